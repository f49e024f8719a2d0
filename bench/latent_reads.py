"""Cache bytes that a decode step of latent attention reads per cached token, by heads. Counted.

All heads share one row per token, so the bytes must not grow with them. Counted are the bytes that
the real pass gathers from the pages. Attention reads nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.report import Row, at_most
from common.engine.attention.latent import LatentPass, LatentProjection
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.layout.cache_layout import ServerLayout
from common.layout.families import mla_components

HEAD_COUNTS = (8, 32, 128)
LAYER_COUNT = 2
LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
ROW_NBYTES = (LATENT_DIM + ROPE_DIM) * 2  # in bfloat16
PAGE_SIZE = 16
# Equal and whole pages: rows that only fill a batch or a page up are no part of this question.
KV_LENGTHS = (256, 256, 256)


class CountingScratch(Scratch):
    """Counts the bytes that are copied out of the cache into it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_nbytes = 0

    def take(self, like: Tensor, row_count: int) -> Tensor:
        taken = super().take(like, row_count)
        self.taken_nbytes += taken.nbytes
        return taken


def run() -> list[Row]:
    """Rows in bytes per token and layer, held against the one row of the cache that a token has."""
    rows: list[Row] = []
    for count in HEAD_COUNTS:
        value = read_nbytes_per_token(count)
        ratio = value / ROW_NBYTES
        name, target = f"latent_read_{count}_heads", at_most(1)
        rows.append(Row(name, value, "B/token", "row", ROW_NBYTES, ratio, target=target))
    return rows


@torch.inference_mode()
def read_nbytes_per_token(head_count: int) -> float:
    """Cache bytes read per cached token and layer by one decode step of three sequences."""
    components = mla_components(
        layer_count=LAYER_COUNT,
        latent_dim=LATENT_DIM,
        rope_dim=ROPE_DIM,
        is_interleaved=True,
        dtype="bfloat16",
    )
    layout = ServerLayout(components, 1, ((0, LAYER_COUNT),), PAGE_SIZE)
    page_count = sum(KV_LENGTHS) // PAGE_SIZE
    pool = KvPool.allocate(layout.ranks[0], [page_count], "cpu")
    pages = iter(range(1, page_count + 1))
    chunks = [
        SequenceChunk([0], length - 1, ([next(pages) for _ in range(length // PAGE_SIZE)],))
        for length in KV_LENGTHS
    ]
    batch = ForwardBatch.build(chunks, groups=pool.groups, device="cpu")
    scratch = CountingScratch()
    attention = LatentPass(batch, pool, scratch)
    generator = torch.Generator().manual_seed(head_count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    projection = LatentProjection(
        draw(head_count, NOPE_DIM, LATENT_DIM), draw(head_count, VALUE_DIM, LATENT_DIM), 0.07
    )
    for layer in range(LAYER_COUNT):
        query = draw(len(chunks), head_count, NOPE_DIM + ROPE_DIM)
        row = draw(len(chunks), LATENT_DIM + ROPE_DIM)
        output = attention.attend_latent(layer, query, row, projection)
        assert output.shape == (len(chunks), head_count, VALUE_DIM)
    return scratch.taken_nbytes / sum(KV_LENGTHS) / LAYER_COUNT
