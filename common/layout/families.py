"""The cache components of every supported family. No other file on a cache's way names a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.layout.component import (
    DTYPE_NBYTES,
    FULL,
    SLOT,
    CacheComponent,
    Live,
    LiveKind,
    Segment,
    Shard,
)


def gqa_components(
    *, layer_count: int, kv_head_count: int, head_dim: int, dtype: str
) -> tuple[CacheComponent, ...]:
    """Keys (after norm and rope, half-split pairs) and values of a dense or MoE GQA model."""
    return mixed_gqa_components([CachedHeads(0, kv_head_count, head_dim)] * layer_count, dtype)


def mla_components(
    *, layer_count: int, latent_dim: int, rope_dim: int, is_interleaved: bool, dtype: str
) -> tuple[CacheComponent, ...]:
    """Latent attention: one row [latent after its norm | rotated key] for all heads of a layer.

    Every rank needs all of it, so every rank has all of it. is_interleaved: how the rotated
    part pairs its channels; caches of the two conventions do not mix.
    """
    order = "rope-pairs" if is_interleaved else "rope-half"
    return (_row("latent", tuple(range(layer_count)), latent_dim + rope_dim, dtype, order),)


def hybrid_mla_components(
    *, layers: tuple[int, ...], latent_dim: int, rope_dim: int, is_rotated: bool, dtype: str
) -> tuple[CacheComponent, ...]:
    """Latent attention of a model of which only some layers have it.

    is_rotated: whether the last part of a row is, in interleaved pairs; it is there all the same.
    """
    order = "rope-pairs" if is_rotated else "rope-none"
    return (_row("latent", layers, latent_dim + rope_dim, dtype, order),)


def sparse_mla_components(
    *,
    layer_count: int,
    latent_dim: int,
    rope_dim: int,
    is_interleaved: bool,
    index_layers: tuple[int, ...],
    index_dim: int,
    is_index_interleaved: bool,
    dtype: str,
) -> tuple[CacheComponent, ...]:
    """Latent attention. Layers that choose the visible tokens have one index key for all heads too.

    index_layers: global ids; the others share the choice of a layer before them and own none.
    """
    latent = mla_components(
        layer_count=layer_count,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        is_interleaved=is_interleaved,
        dtype=dtype,
    )
    order = "rope-pairs" if is_index_interleaved else "rope-half"
    return (*latent, _row("index_k", index_layers, index_dim, dtype, order))


def windowed_gqa_components(
    *, windows: tuple[int, ...], kv_head_count: int, head_dim: int, dtype: str
) -> tuple[CacheComponent, ...]:
    """Keys and values of layers of which some see a window only.

    windows: of every layer, in tokens, 0 for all of the past. Layers of one width share a page
    group; those that see everything come first.
    """
    shapes = [CachedHeads(window, kv_head_count, head_dim) for window in windows]
    return mixed_gqa_components(shapes, dtype)


def with_more_layers(
    components: Sequence[CacheComponent], more: Sequence[CacheComponent]
) -> tuple[CacheComponent, ...]:
    """Components of a model, and those of layers behind its own. Layers that are cached alike are
    of one component."""
    joined = list(components)
    for one in more:
        alike = [i for i, own in enumerate(joined) if replace(own, layers=one.layers) == one]
        if alike:
            own = joined[alike[0]]
            joined[alike[0]] = replace(own, layers=(*own.layers, *one.layers))
        else:
            joined.append(one)
    return tuple(joined)


@dataclass(frozen=True, order=True, slots=True)
class CachedHeads:
    """Cache of one layer. window: in tokens, 0 for all of the past."""

    window: int
    kv_head_count: int
    head_dim: int


def mixed_gqa_components(
    shapes: Sequence[CachedHeads | None], dtype: str
) -> tuple[CacheComponent, ...]:
    """Keys and values of layers that differ in their windows, their KV heads or the size of a head.

    shapes: of every layer, None for one that owns no cache. Those that see everything come first.
    """
    return tuple(
        CacheComponent(
            name=name,
            layers=tuple(layer for layer, of_layer in enumerate(shapes) if of_layer == shape),
            segments=(Segment("head", shape.kv_head_count, shape.head_dim * DTYPE_NBYTES[dtype]),),
            live=Live(LiveKind.WINDOW, shape.window) if shape.window else FULL,
            shard=Shard.SPLIT,
            dtype=dtype,
            order="rope-half" if name == "k" else "",
        )
        for shape in sorted({shape for shape in shapes if shape is not None})
        for name in ("k", "v")
    )


def compressed_components(
    *,
    layer_count: int,
    window: int,
    head_dim: int,
    index_dim: int,
    sparse_layers: tuple[int, ...],
    sparse_ratio: int,
    heavy_layers: tuple[int, ...],
    heavy_ratio: int,
    dtype: str,
) -> tuple[CacheComponent, ...]:
    """DeepSeek-V4: one row per token of a window, one per block of `ratio` tokens before, and what
    the tokens of the open block need to become one.

    A tail's row is what every token is projected to, [keys | gates] in fp32, without the bias of
    its place in the block. Layers of the sparse ratio have rows for the indexer beside those of the
    attention; there, a token's row has [for the next block | for its own] of both, so the block
    before the open one is kept too. All of it is the same for all heads: every rank has all of it.
    """

    rotated, gated = "rope-pairs-last", "key-gate"
    window_live = Live(LiveKind.WINDOW, window)
    sparse_block, heavy_block = (
        Live(LiveKind.BLOCK, ratio) for ratio in (sparse_ratio, heavy_ratio)
    )
    sparse_tail = Live(LiveKind.TAIL, sparse_ratio, back=sparse_ratio)
    heavy_tail = Live(LiveKind.TAIL, heavy_ratio)
    components = [
        _row("window", tuple(range(layer_count)), head_dim, dtype, rotated, window_live),
        _row("csa_block", sparse_layers, head_dim, dtype, rotated, sparse_block),
        _row("csa_index", sparse_layers, index_dim, dtype, rotated, sparse_block),
        _row("csa_tail", sparse_layers, 4 * head_dim, "float32", gated, sparse_tail),
        _row("csa_index_tail", sparse_layers, 4 * index_dim, "float32", gated, sparse_tail),
        _row("hca_block", heavy_layers, head_dim, dtype, rotated, heavy_block),
        _row("hca_tail", heavy_layers, 2 * head_dim, "float32", gated, heavy_tail),
    ]
    return tuple(component for component in components if component.layers)


def gated_delta_components(
    *,
    layers: tuple[int, ...],
    key_heads: tuple[int, int],
    value_heads: tuple[int, int],
    kernel_size: int,
    conv_dtype: str,
    state_dtype: str,
) -> tuple[CacheComponent, ...]:
    """Of a gated delta rule: the last inputs of the convolution over q, k and v, and the state.

    A head of the convolution is [channel, kernel_size - 1], oldest first; a state is [key channel,
    value channel]. Fewer key heads than ranks are replicated with the value heads that they serve.

    key_heads, value_heads: (count, channels of one).
    """
    parts = (("q", *key_heads), ("k", *key_heads), ("v", *value_heads))
    state_size = key_heads[1] * value_heads[1]
    return (
        _conv(layers, parts, kernel_size, conv_dtype),
        _state(layers, value_heads[0], state_size, state_dtype, "KV"),
    )


def mamba_components(
    *,
    layers: tuple[int, ...],
    heads: tuple[int, int],
    groups: tuple[int, int],
    kernel_size: int,
    conv_dtype: str,
) -> tuple[CacheComponent, ...]:
    """Mamba-2: the last inputs of the convolution over x, B and C, and the state of each head.

    Laid out as those of a gated delta rule; a state is [channel of x, channel of B] and fp32, since
    it is summed up along all of a sequence. A group's B and C go wherever one of its heads goes.

    heads: (count, channels of one), groups: (count, channels of B and of C in one).
    """
    parts = (("x", *heads), ("b", *groups), ("c", *groups))
    return (
        _conv(layers, parts, kernel_size, conv_dtype),
        _state(layers, heads[0], heads[1] * groups[1], "float32", "PS"),
    )


def lightning_components(
    *, layers: tuple[int, ...], head_count: int, head_dim: int
) -> tuple[CacheComponent, ...]:
    """Linear attention with a fixed decay: the sum of value times key of each head.

    It is [value channel, key channel], and fp32, because it is summed up along all of a sequence.
    """
    return (_state(layers, head_count, head_dim * head_dim, "float32", "VK"),)


# --------------------------------------------------------------------------------------------------


def _row(
    name: str, layers: tuple[int, ...], size: int, dtype: str, order: str, live: Live = FULL
) -> CacheComponent:
    """A row of `size` elements that is the same for all heads: every rank has all of it."""
    row = Segment("row", 1, size * DTYPE_NBYTES[dtype])
    return CacheComponent(name, layers, (row,), live, Shard.REPLICATE, dtype, order)


def _conv(
    layers: tuple[int, ...],
    parts: Sequence[tuple[str, int, int]],
    kernel_size: int,
    dtype: str,
) -> CacheComponent:
    """The last inputs of a short convolution. parts: (name, heads, channels of a head)."""
    kept_nbytes = (kernel_size - 1) * DTYPE_NBYTES[dtype]
    segments = tuple(
        Segment(name, count, channels * kept_nbytes) for name, count, channels in parts
    )
    return CacheComponent("conv", layers, segments, SLOT, Shard.SPLIT, dtype, "channel-tap")


def _state(
    layers: tuple[int, ...], head_count: int, size: int, dtype: str, order: str
) -> CacheComponent:
    """A recurrence's state of `size` elements per head."""
    head = Segment("head", head_count, size * DTYPE_NBYTES[dtype])
    return CacheComponent("state", layers, (head,), SLOT, Shard.SPLIT, dtype, order)
