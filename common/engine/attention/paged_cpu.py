"""Attention on a CPU straight over the envelopes, by the native module `_attention`.

Nothing is gathered. Prompts are multiplied by oneDNN's products, which torch exports to C++ with
fp32 results and to Python only with results in the type of what is multiplied: scores in bfloat16
are wrong where keys have a large bias. Its own products of scores reach half of oneDNN's speed on
processors that are not Intel's. `choose.py` first checks every kind of layer against SDPA.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE
from common.engine.attention.cache_kinds import kind_of
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.cache.kv_pool import KvPool, Plane, Scratch
from common.engine.forward_batch import ForwardBatch
from common.engine.native_modules import DTYPE_NAMES, load_native

if TYPE_CHECKING:
    from baton_native._attention import Batch

HEAD_DIM_STEP, HEAD_DIM_MAX = 16, 512


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
        self._make_batch: type[Batch] = load_native("_attention").Batch
        self._kinds = frozenset(kinds)
        self._scratch = (Scratch(), Scratch())

    def start(self, batch: ForwardBatch, pool: KvPool) -> PagedCpuPass:
        return PagedCpuPass(batch, pool, self._scratch, self._kinds, self._make_batch)


class PagedCpuPass(SdpaPass):
    """See `AttentionPass`."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        scratch: tuple[Scratch, Scratch],
        kinds: frozenset[AttentionKind],
        make_batch: type[Batch],
    ) -> None:
        super().__init__(batch, pool, scratch)
        self._kinds = kinds
        self._make_batch = make_batch
        self._batches: dict[int, Batch] = {}

    def _attend(
        self, layer: int, query: Tensor, new: tuple[Tensor, Tensor] | None, rule: ScoreRule
    ) -> Tensor:
        keys, values = (self._pool.plane(part, layer) for part in (KEY, VALUE))
        kind = kind_of(keys, self._pool, query.shape[1], rule)
        if kind not in self._kinds:
            return super()._attend(layer, query, new, rule)
        assert keys.geometry == values.geometry, (keys.geometry, values.geometry)
        assert keys.view.dtype == query.dtype, (keys.view.dtype, query.dtype)
        # Queries may lie among keys and values, as one product makes them; only a head has to be
        # without gaps.
        assert query.stride(-1) == 1, query.stride()
        output = torch.empty(query.shape, dtype=query.dtype)
        sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
        page_stride, unit_stride, item_stride, _ = keys.view.stride()
        assert item_stride == kind.head_dim, keys.view.stride()
        self._batch_of(keys).attend(
            DTYPE_NAMES[query.dtype],
            output.data_ptr(),
            query.data_ptr(),
            keys.view.data_ptr(),
            values.view.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            kind.head_count,
            kind.kv_head_count,
            kind.head_dim,
            page_stride,
            unit_stride,
            query.stride(0),
            query.stride(1),
            kind.window,
            kind.score_scale,
            kind.softcap,
        )
        return output

    def _batch_of(self, keys: Plane) -> Batch:
        """Of the page group of a layer; made for the first one."""
        group = keys.geometry.group
        if group not in self._batches:
            starts = torch.zeros(len(self._batch.query_lengths) + 1, dtype=torch.int32)
            torch.cumsum(torch.tensor(self._batch.query_lengths), 0, out=starts[1:])
            self._batches[group] = self._make_batch(
                starts,
                torch.tensor(self._batch.kv_length_list, dtype=torch.int32),
                self._batch.page_tables[group].contiguous(),
                self._pool.page_items[group],
                self._pool.page_counts[group] + 1,
            )
        return self._batches[group]
