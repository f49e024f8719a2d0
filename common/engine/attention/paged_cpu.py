"""Attention on a CPU straight over the envelopes, by the native module `_attention`.

Nothing is gathered. Prompts are multiplied by oneDNN's products, which torch exports to C++ with
fp32 results and to Python only with results in the type of what is multiplied: scores in bfloat16
are wrong where keys have a large bias. Its own products of scores reach half of oneDNN's speed on
processors that are not Intel's. `choose.py` first checks every kind of layer against SDPA.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE
from common.engine.attention.cache_kinds import kind_of
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.scores import PLAIN, ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.forward_batch import ForwardBatch
from common.engine.native_modules import DTYPE_NAMES, load_native

if TYPE_CHECKING:
    from baton_native._attention import Batch, Layer

HEAD_DIM_STEP, HEAD_DIM_MAX = 16, 512
NOTHING_NEW = (0, 0, 0, 0, 0, 0)


def why_not_paged(kind: AttentionKind, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> str:
    """Why layers of a kind are not tried; "" if they are. cache_dtype: None for `dtype`."""
    if dtype not in DTYPE_NAMES:
        return f"no kernel for {dtype}, which must be float32 or bfloat16"
    if cache_dtype not in (None, dtype):
        return f"no kernel for {dtype} over a cache of {cache_dtype}"
    if kind.head_dim % HEAD_DIM_STEP or kind.head_dim > HEAD_DIM_MAX:
        allowed = f"a multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        return f"no kernel for head dim {kind.head_dim}, which must be {allowed}"
    return ""


class PagedCpuAttention:
    """See `Attention`. kinds: of the layers that it may be used for; SDPA does the others.

    Raises: RuntimeError if this processor or this torch lacks what it needs.
    """

    name = "onednn"

    def __init__(self, kinds: Collection[AttentionKind]) -> None:
        self._native = load_native("_attention")
        self._kinds = frozenset(kinds)
        self._scratch = (Scratch(), Scratch())
        self._layers: _Layers | None = None

    def start(self, batch: ForwardBatch, pool: KvPool) -> PagedCpuPass:
        if self._layers is None or self._layers.pool is not pool:
            self._layers = _Layers(pool, self._kinds, self._native.Layer)
        return PagedCpuPass(batch, self._layers, self._scratch, self._native.Batch)


@dataclass(frozen=True, slots=True)
class _LayerMemory:
    """A layer of a pool, for heads of a rule. native: None if SDPA does it. sinks: kept for it."""

    rule: ScoreRule
    head_count: int
    group: int
    native: Layer | None
    sinks: Tensor | None = None


class _Layers:
    """Those of one pool that passes have met."""

    def __init__(
        self, pool: KvPool, kinds: frozenset[AttentionKind], make_layer: type[Layer]
    ) -> None:
        self.pool = pool
        self._kinds = kinds
        self._make_layer = make_layer
        self._known: dict[int, _LayerMemory] = {}

    def get(self, layer: int, query: Tensor, rule: ScoreRule) -> _LayerMemory:
        known, head_count = self._known.get(layer), query.shape[1]
        if known is None or known.rule is not rule or known.head_count != head_count:
            known = self._known[layer] = self._make(layer, query, rule)
        return known

    def _make(self, layer: int, query: Tensor, rule: ScoreRule) -> _LayerMemory:
        keys, values = (self.pool.plane(part, layer) for part in (KEY, VALUE))
        kind, group = kind_of(keys, self.pool, query.shape[1], rule), keys.geometry.group
        if kind not in self._kinds:
            return _LayerMemory(rule, kind.head_count, group, None)
        assert keys.geometry == values.geometry, (keys.geometry, values.geometry)
        assert keys.view.dtype == values.view.dtype == query.dtype, (keys.view.dtype, query.dtype)
        sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
        page_stride, unit_stride, item_stride, _ = keys.view.stride()
        assert item_stride == kind.head_dim, keys.view.stride()
        native = self._make_layer(
            DTYPE_NAMES[query.dtype],
            keys.view.data_ptr(),
            values.view.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            kind.head_count,
            kind.kv_head_count,
            kind.head_dim,
            page_stride,
            unit_stride,
            kind.window,
            kind.score_scale,
            kind.softcap,
        )
        return _LayerMemory(rule, kind.head_count, group, native, sinks)


class PagedCpuPass(SdpaPass):
    """See `AttentionPass`."""

    def __init__(
        self,
        batch: ForwardBatch,
        layers: _Layers,
        scratch: tuple[Scratch, Scratch],
        make_batch: type[Batch],
    ) -> None:
        super().__init__(batch, layers.pool, scratch)
        self._layers = layers
        self._make_batch = make_batch
        self._batches: dict[int, Batch] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule = PLAIN
    ) -> Tensor:
        """See `SdpaPass`."""
        memory = self._layers.get(layer, query, rule)
        if memory.native is None:
            return super().attend(layer, query, key, value, rule)
        assert key.dtype == value.dtype == query.dtype, (key.dtype, value.dtype)
        assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
        key_row, key_head, _ = key.stride()
        value_row, value_head, _ = value.stride()
        news = (key.data_ptr(), key_row, key_head, value.data_ptr(), value_row, value_head)
        return self._run(memory.group, memory.native, query, news)

    def attend_shared(self, layer: int, query: Tensor, rule: ScoreRule = PLAIN) -> Tensor:
        """See `SdpaPass`."""
        memory = self._layers.get(layer, query, rule)
        if memory.native is None:
            return super().attend_shared(layer, query, rule)
        return self._run(memory.group, memory.native, query, NOTHING_NEW)

    def _run(
        self, group: int, layer: Layer, query: Tensor, news: tuple[int, int, int, int, int, int]
    ) -> Tensor:
        # Queries may lie among keys and values, as one product makes them; only a head has to be
        # without gaps.
        row_stride, head_stride, item_stride = query.stride()
        assert item_stride == 1, query.stride()
        output = torch.empty(query.shape, dtype=query.dtype)
        self._batch_of(group).attend(
            layer, output.data_ptr(), query.data_ptr(), row_stride, head_stride, *news
        )
        return output

    def _batch_of(self, group: int) -> Batch:
        """Of a page group; made for its first layer."""
        if group not in self._batches:
            self._batches[group] = self._make_batch(
                self._batch.query_starts,
                self._batch.kv_lengths,
                self._batch.page_tables[group].contiguous(),
                self._pool.page_items[group],
                self._pool.page_counts[group] + 1,
            )
        return self._batches[group]
