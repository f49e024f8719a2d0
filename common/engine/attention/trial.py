"""The proof at start that a backend's numbers are right: it is compared with SDPA, kind by kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.attention import Attention, AttentionPass, RecordableAttention
from common.engine.attention.flashinfer_latent import FlashInferLatentAttention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.latent import LatentAttention, LatentProjection
from common.engine.attention.scores import PLAIN, ScoreRule
from common.engine.attention.sdpa import SdpaAttention, SdpaPass
from common.engine.cache.cast import CACHE_DTYPES, raw
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, HostRows, SequenceChunk
from common.engine.graphs.recording import Record
from common.engine.kernel_trial import largest_difference
from common.layout.cache_layout import ServerLayout
from common.layout.component import CacheComponent
from common.layout.families import mla_components, windowed_gqa_components

# Two roundings, relative to an output of at least one: the kernels may round their probabilities,
# SDPA rounds its own. A wrong page, head or mask is off by the order of one.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LAYERS = 2
# (tokens in the cache before, new tokens), in tokens: first chunks, later chunks, decodes; lengths
# at, before and behind the end of a page, and longer than one tile of keys.
_MIXED = ((0, 5), (0, 16), (31, 17), (300, 40), (64, 1), (15, 1))
_DECODE = ((0, 1), (15, 1), (16, 1), (299, 1), (47, 1))
WHOLE_CHUNK_MAX = 1024
"""Windows up to here are also tried with a chunk that is longer: SDPA scores all of it at once."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Requirements on a rank's attention.

    kinds: of its layers over keys and values. latent: of those over latent rows; None if there are
    none. is_compressed: whether they are over rows of a window and blocks instead. cache_dtype: of
    the pool's keys and values; None for `dtype`.
    """

    kinds: tuple[AttentionKind, ...]
    dtype: torch.dtype
    device: torch.device
    page_size: int
    cache_dtype: torch.dtype | None = None
    latent: LatentKind | None = None
    is_compressed: bool = False


@torch.inference_mode()
def check_attention(candidate: Attention, kind: AttentionKind, shape: AttentionShape) -> float:
    """The largest difference to SDPA over a mixed and a decode-only batch of random content.

    NaN if anything is not finite. Both write to pools of their own, which are compared as well.
    """
    worst = 0.0
    for lengths in trial_lengths(kind.window):
        generator = torch.Generator().manual_seed(len(lengths))
        pools = (_random_pool(kind, shape), _random_pool(kind, shape))
        batch = random_batch(lengths, pools[0], shape.device, window=kind.window)
        passes = (SdpaAttention().start(batch, pools[0]), candidate.start(batch, pools[1]))
        rule = _rule(kind, generator, shape)
        for layer in range(_LAYERS):
            parts = _random_heads(generator, batch.token_count, kind, shape)
            expected, actual = (_attend(each, layer, parts, rule) for each in passes)
            difference = largest_difference(expected, actual)
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
        if not torch.equal(pools[0].buffers[0], pools[1].buffers[0]):
            return math.inf
    return worst


@torch.inference_mode()
def check_latent(
    candidate: LatentAttention | FlashInferLatentAttention, kind: LatentKind, shape: AttentionShape
) -> float:
    """As `check_attention`, over latent rows and against torch's path for them."""
    worst = 0.0
    for lengths in trial_lengths():
        generator = torch.Generator().manual_seed(len(lengths))
        pools = (_latent_pool(kind, shape), _latent_pool(kind, shape))
        batch = random_batch(lengths, pools[0], shape.device)
        passes = (LatentAttention().start(batch, pools[0]), candidate.start(batch, pools[1]))
        projection = _random_projection(generator, kind, shape)
        for layer in range(_LAYERS):
            query, row = _random_rows(generator, batch.token_count, kind, shape)
            expected, actual = (
                each.attend_latent(layer, query, row, projection) for each in passes
            )
            difference = largest_difference(expected, actual)
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
        if not torch.equal(pools[0].buffers[0], pools[1].buffers[0]):
            return math.inf
    return worst


@torch.inference_mode()
def check_recorded(
    candidate: RecordableAttention, kind: AttentionKind, shape: AttentionShape, record: Record
) -> float:
    """As `check_attention`, of decodes that are recorded when they are short and replayed when they
    are long."""
    pool = _random_pool(kind, shape)
    short, long = _recorded_batches(candidate, pool, shape, kind.window)
    generator = torch.Generator().manual_seed(0)
    rule = _rule(kind, generator, shape)
    query, _, _ = _random_heads(generator, long.token_count, kind, shape)
    started = candidate.start_recorded(short, pool)
    assert isinstance(started, SdpaPass)
    recording = record(lambda: started.attend_shared(0, query, rule))
    candidate.plan_recorded(HostRows.of(long), pool)
    recording.replay()
    expected = SdpaAttention().start(long, pool).attend_shared(0, query, rule)
    return largest_difference(expected, recording.output)


@torch.inference_mode()
def check_recorded_latent(
    candidate: FlashInferLatentAttention, kind: LatentKind, shape: AttentionShape, record: Record
) -> float:
    """As `check_recorded`, over latent rows."""
    pool = _latent_pool(kind, shape)
    short, long = _recorded_batches(candidate, pool, shape)
    generator = torch.Generator().manual_seed(0)
    projection = _random_projection(generator, kind, shape)
    query, row = _random_rows(generator, long.token_count, kind, shape)
    expected = LatentAttention().start(long, pool).attend_latent(0, query, row, projection)
    # The rows are in the cache by now; a recording that wrote them would write to the short ones.
    started = candidate.start_recorded(short, pool)
    recording = record(lambda: started.attend_cached(0, query, projection))
    candidate.plan_recorded(HostRows.of(long), pool)
    recording.replay()
    return largest_difference(expected, recording.output)


def _recorded_batches(
    candidate: RecordableAttention, pool: KvPool, shape: AttentionShape, window: int = 0
) -> tuple[ForwardBatch, ForwardBatch]:
    """As many short and long decodes; the short ones are reserved and planned."""
    lengths = trial_lengths(window)[1]
    short, long = (
        random_batch(each, pool, shape.device, window=window)
        for each in (((1, 1),) * len(lengths), lengths)
    )
    page_max = max(-(-length // shape.page_size) for length in long.kv_length_list)
    candidate.reserve((len(lengths),), page_max)
    candidate.plan_recorded(HostRows.of(short), pool)
    return short, long


def trial_lengths(window: int = 0) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(tokens in the cache before, new tokens) of a mixed batch and one of decodes.

    A window adds sequences that fill it, begin inside a page and have pages before it.
    """
    if not window:
        return _MIXED, _DECODE
    mixed = [*_MIXED, (window - 1, 20), (window + 37, 23), (2 * window + 5, 1)]
    if window <= WHOLE_CHUNK_MAX:
        mixed.append((0, window + 20))
    return tuple(mixed), (*_DECODE, (window - 1, 1), (window, 1), (window + 33, 1))


def random_batch(
    lengths: tuple[tuple[int, int], ...], pool: KvPool, device: torch.device, *, window: int = 0
) -> ForwardBatch:
    """On shuffled pages of the pool's one group; those that a window has left are page 0."""
    generator = torch.Generator().manual_seed(1)
    page_items = pool.page_items[0]
    page_ids = (torch.randperm(pool.page_counts[0], generator=generator) + 1).tolist()
    chunks: list[SequenceChunk] = []
    for cached, new in lengths:
        left = max(0, cached - window + 1) // page_items if window else 0
        count = -(-(cached + new) // page_items)
        pages = [0] * left + [page_ids.pop() for _ in range(count - left)]
        chunks.append(SequenceChunk([0] * new, cached, (pages,)))
    return ForwardBatch.build(chunks, groups=pool.groups, device=device)


def _attend(
    attention_pass: AttentionPass,
    layer: int,
    parts: tuple[Tensor, Tensor, Tensor],
    rule: ScoreRule,
) -> Tensor:
    if rule is PLAIN:
        return attention_pass.attend(layer, *parts)
    assert isinstance(attention_pass, SdpaPass), "scores with a rule are SDPA's, or an heir's"
    return attention_pass.attend(layer, *parts, rule)


def _rule(kind: AttentionKind, generator: torch.Generator, shape: AttentionShape) -> ScoreRule:
    sinks = _random(generator, (kind.head_count,), shape) if kind.has_sinks else None
    if sinks is None and kind.scale is None and not kind.softcap:
        return PLAIN
    return ScoreRule(kind.scale, kind.softcap, sinks)


def _random_heads(
    generator: torch.Generator, token_count: int, kind: AttentionKind, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, side by side as one product makes them."""
    counts = [kind.head_count, kind.kv_head_count, kind.kv_head_count]
    heads = _random(generator, (token_count, sum(counts), kind.head_dim), shape)
    query, key, value = torch.split(heads, counts, dim=1)
    return query, key, value


def _random_projection(
    generator: torch.Generator, kind: LatentKind, shape: AttentionShape
) -> LatentProjection:
    """Such that keys, values and scores are of the order of one."""
    key, value = (
        _random(generator, (kind.head_count, dim, kind.latent_dim), shape) * kind.latent_dim**-0.5
        for dim in (kind.nope_dim, kind.value_dim)
    )
    return LatentProjection(key, value, kind.scale)


def _random_rows(
    generator: torch.Generator, token_count: int, kind: LatentKind, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Queries and rows of new tokens."""
    query_dim, row_dim = kind.nope_dim + kind.rope_dim, kind.latent_dim + kind.rope_dim
    query = _random(generator, (token_count, kind.head_count, query_dim), shape)
    return query, _random(generator, (token_count, row_dim), shape)


def _random(generator: torch.Generator, size: tuple[int, ...], shape: AttentionShape) -> Tensor:
    return torch.randn(size, generator=generator).to(shape.dtype).to(shape.device)


def _random_pool(kind: AttentionKind, shape: AttentionShape) -> KvPool:
    components = windowed_gqa_components(
        windows=(kind.window,) * _LAYERS,
        kv_head_count=kind.kv_head_count,
        head_dim=kind.head_dim,
        dtype=_dtype_name(shape),
    )
    return _pool_of(components, shape, kind.window)


def _latent_pool(kind: LatentKind, shape: AttentionShape) -> KvPool:
    components = mla_components(
        layer_count=_LAYERS,
        latent_dim=kind.latent_dim,
        rope_dim=kind.rope_dim,
        is_interleaved=False,
        dtype=_dtype_name(shape),
    )
    return _pool_of(components, shape)


def _dtype_name(shape: AttentionShape) -> str:
    wanted = shape.cache_dtype or shape.dtype
    return next(name for name, dtype in CACHE_DTYPES.items() if dtype == wanted)


def _pool_of(
    components: tuple[CacheComponent, ...], shape: AttentionShape, window: int = 0
) -> KvPool:
    """The same random content every time."""
    layout = ServerLayout(components, 1, ((0, _LAYERS),), shape.page_size)
    lengths = max(trial_lengths(window), key=lambda each: sum(map(sum, each)))
    page_count = sum(-(-sum(each) // shape.page_size) for each in lengths)
    pool = KvPool.allocate(layout.rank(0, 0), [page_count], shape.device)
    generator = torch.Generator().manual_seed(0)
    for layer in range(_LAYERS):
        for component in components:
            view = pool.view(component.name, layer)
            content = torch.randn(view.shape, generator=generator).to(view.dtype)
            raw(view).copy_(raw(content))
    return pool
