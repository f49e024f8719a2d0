"""Which attention backend a rank uses, and the proof at start that its numbers are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.attention import Attention, RecordableAttention
from common.engine.attention.compressed import CompressedAttention
from common.engine.attention.flashinfer import (
    SUPPORTED_DTYPES,
    SUPPORTED_HEAD_DIMS,
    FlashInferAttention,
)
from common.engine.attention.latent import LatentAttention
from common.engine.attention.sdpa import SdpaAttention
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.kernel_trial import largest_difference, try_kernels
from common.engine.kv_pool import DTYPES, KvPool
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components

# Two roundings, relative to an output of at least one: the kernels may round their probabilities,
# SDPA rounds its own. A wrong page, head or mask is off by the order of one.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_CHECK_LAYERS = 2
# (tokens in the cache before, new tokens), in tokens: first chunks, later chunks, decodes; lengths
# at, before and behind the end of a page, and longer than one tile of keys.
_CHECK_MIXED = ((0, 5), (0, 16), (31, 17), (300, 40), (64, 1), (15, 1))
_CHECK_DECODE = ((0, 1), (15, 1), (16, 1), (299, 1), (47, 1))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of one rank. cache_dtype: of the pool's keys and values; None for `dtype`.

    is_latent: the cache holds latent rows instead of keys and values. is_compressed: it holds rows
    of a window and blocks. needs_sdpa: some layer sees a window only, or does more to its scores
    than scale them.
    """

    head_count: int
    kv_head_count: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    page_size: int
    cache_dtype: torch.dtype | None = None
    is_latent: bool = False
    is_compressed: bool = False
    needs_sdpa: bool = False


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend, and why it is this one; for the log and /server_info.

    recordable: the backend again, if its decode passes can be recorded.
    """

    attention: Attention
    reason: str
    recordable: RecordableAttention | None = None


def choose_attention(shape: AttentionShape) -> AttentionChoice:
    """FlashInfer on CUDA if it is there and agrees with SDPA, SDPA otherwise."""
    if shape.is_latent:
        return AttentionChoice(LatentAttention(), "the path of latent rows on every device")
    if shape.is_compressed:
        return AttentionChoice(
            CompressedAttention(), "the path of windows beside blocks on every device"
        )
    sdpa: Attention = SdpaAttention()
    if shape.device.type != "cuda":
        return AttentionChoice(sdpa, f"the path of {shape.device.type}")
    if shape.needs_sdpa:
        return AttentionChoice(sdpa, "the path of windows, capped scores and sinks on every device")
    if shape.dtype not in SUPPORTED_DTYPES or shape.head_dim not in SUPPORTED_HEAD_DIMS:
        return AttentionChoice(
            sdpa, f"flashinfer has no kernel for {shape.dtype} with head dim {shape.head_dim}"
        )
    if shape.cache_dtype not in (None, shape.dtype):
        return AttentionChoice(
            sdpa, f"flashinfer is not checked over a cache of {shape.cache_dtype} for {shape.dtype}"
        )

    def build_and_check() -> tuple[Attention, float]:
        candidate = FlashInferAttention(
            head_count=shape.head_count,
            kv_head_count=shape.kv_head_count,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=shape.device,
        )
        return candidate, check_attention(candidate, shape)

    tolerance = TOLERANCE[shape.dtype]
    return AttentionChoice(*try_kernels("flashinfer", build_and_check, tolerance, sdpa))


@torch.inference_mode()
def check_attention(candidate: Attention, shape: AttentionShape) -> float:
    """The largest difference to SDPA over a mixed and a decode-only batch of random content.

    NaN if anything is not finite. Both write to pools of their own, which are compared as well.
    """
    worst = 0.0
    for lengths in (_CHECK_MIXED, _CHECK_DECODE):
        generator = torch.Generator().manual_seed(len(lengths))
        pools = (_random_pool(shape), _random_pool(shape))
        batch = _random_batch(lengths, pools[0], shape)
        passes = (SdpaAttention().start(batch, pools[0]), candidate.start(batch, pools[1]))
        for layer in range(_CHECK_LAYERS):
            query = _random(generator, shape, batch.token_count, shape.head_count)
            key = _random(generator, shape, batch.token_count, shape.kv_head_count)
            value = _random(generator, shape, batch.token_count, shape.kv_head_count)
            expected, actual = (p.attend(layer, query, key, value) for p in passes)
            difference = largest_difference(expected, actual)
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
        if not torch.equal(pools[0].buffers[0], pools[1].buffers[0]):
            return math.inf
    return worst


def _random(generator: torch.Generator, shape: AttentionShape, rows: int, heads: int) -> Tensor:
    values = torch.randn(rows, heads, shape.head_dim, generator=generator)
    return values.to(shape.dtype).to(shape.device)


def _random_pool(shape: AttentionShape) -> KvPool:
    """The same random content every time."""
    dtype_name = next(name for name, dtype in DTYPES.items() if dtype == shape.dtype)
    components = gqa_components(
        layer_count=_CHECK_LAYERS,
        kv_head_count=shape.kv_head_count,
        head_dim=shape.head_dim,
        dtype=dtype_name,
    )
    layout = ServerLayout(components, 1, ((0, _CHECK_LAYERS),), shape.page_size)
    page_count = sum(_pages(total, shape) for total in _totals(_CHECK_MIXED))
    pool = KvPool.allocate(layout.rank(0, 0), [page_count], shape.device)
    generator = torch.Generator().manual_seed(0)
    for layer in range(_CHECK_LAYERS):
        for component in ("k", "v"):
            view = pool.view(component, layer)
            view.copy_(torch.randn(view.shape, generator=generator).to(shape.dtype))
    return pool


def _random_batch(
    lengths: tuple[tuple[int, int], ...], pool: KvPool, shape: AttentionShape
) -> ForwardBatch:
    generator = torch.Generator().manual_seed(1)
    page_ids = (torch.randperm(pool.page_counts[0], generator=generator) + 1).tolist()
    chunks: list[SequenceChunk] = []
    for cached, new in lengths:
        pages = [page_ids.pop() for _ in range(_pages(cached + new, shape))]
        chunks.append(SequenceChunk([0] * new, cached, (pages,)))
    return ForwardBatch.build(chunks, groups=pool.groups, device=shape.device)


def _totals(lengths: tuple[tuple[int, int], ...]) -> list[int]:
    return [cached + new for cached, new in lengths]


def _pages(token_count: int, shape: AttentionShape) -> int:
    return -(-token_count // shape.page_size)
