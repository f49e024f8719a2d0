"""Drives a model through the paged cache as a server would: chunks, decodes, random page order."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.engine.cache.cast import CACHE_DTYPES
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.models.causal_lm import CausalLm
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers

PAGE_SIZE = 16


def make_pool(
    model: CausalLm,
    page_count: int,
    *,
    page_size: int = PAGE_SIZE,
    kv_cache_dtype: str = "auto",
    layer_group_count: int = 1,
) -> KvPool:
    """A pool for this rank of the model. Its bytes start as noise: nothing may rely on zeros."""
    config, parallel = model.config, model.context.parallel
    layout = ServerLayout(
        components=cache_components(config, kv_cache_dtype),
        tp_size=parallel.tp_size,
        stages=split_layers(config.layer_count, parallel.pp_size),
        page_size=page_size,
        layer_group_count=layer_group_count,
    )
    layout.check()
    rank = layout.rank(parallel.pp_rank, parallel.tp_rank)
    pool = KvPool.allocate(rank, [page_count] * len(layout.groups), "cpu")
    generator = torch.Generator().manual_seed(7)
    for buffer in pool.buffers:
        values = buffer.view(CACHE_DTYPES[layout.components[0].dtype])
        values.copy_(torch.randn(values.shape, generator=generator) * 3.0)
    return pool


class Sequence:
    """One sequence being computed: its tokens, and its pages in the order they were dealt."""

    def __init__(self, token_ids: list[int], page_ids: list[int]) -> None:
        self.token_ids = list(token_ids)
        self.page_ids = page_ids
        self.computed = 0

    def chunk(self, count: int, *, all_logits: bool = False) -> SequenceChunk:
        """The next `count` tokens; logits of the last one, or of all."""
        stop = self.computed + count
        chunk = SequenceChunk(
            token_ids=self.token_ids[self.computed : stop],
            start=self.computed,
            page_ids=(self.page_ids,),
            logits_offsets=range(count) if all_logits else (count - 1,),
        )
        self.computed = stop
        return chunk


def shuffled_pages(page_count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(page_count, generator=generator) + 1).tolist()


def make_batch(pool: KvPool, chunks: list[SequenceChunk]) -> ForwardBatch:
    # A sequence has the same page ids in every group, and its first one where it has a single page.
    chunks = [
        replace(c, page_ids=[c.page_ids[0][: None if g.live.is_paged else 1] for g in pool.groups])
        for c in chunks
    ]
    return ForwardBatch.build(chunks, groups=pool.groups, device="cpu")


def forward(model: CausalLm, pool: KvPool, chunks: list[SequenceChunk]) -> Tensor:
    logits = model.forward(make_batch(pool, chunks), pool)
    assert logits is not None
    return logits


def greedy(
    model: CausalLm, pool: KvPool, sequence: Sequence, chunk_sizes: list[int], count: int
) -> list[int]:
    """Compute the prompt in chunks of the given sizes, then `count` tokens one by one."""
    assert sum(chunk_sizes) == len(sequence.token_ids)
    for size in chunk_sizes:
        logits = forward(model, pool, [sequence.chunk(size)])
    output = [int(logits[-1].argmax())]
    while len(output) < count:
        sequence.token_ids.append(output[-1])
        output.append(int(forward(model, pool, [sequence.chunk(1)])[0].argmax()))
    return output
