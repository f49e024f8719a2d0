"""Attention that can be recorded anywhere: every row reads all of its page table, by mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE, CacheWriter
from common.engine.attention.sdpa import SdpaAttention
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, HostRows


class DenseAttention(SdpaAttention):
    """See `RecordableAttention`. planned: kv lengths of each plan, as the host knew them."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: tuple[list[int], int] = ([], 0)
        self.planned: list[tuple[int, ...]] = []
        self._table = torch.zeros(0, 0, dtype=torch.int64)

    def reserve(self, batch_sizes: Sequence[int], page_max: int) -> None:
        self.reserved = (list(batch_sizes), page_max)
        self._table = torch.zeros(max(batch_sizes), page_max, dtype=torch.int64)

    def plan_recorded(self, rows: HostRows, pool: KvPool) -> None:
        self.planned.append(tuple(rows.lengths.tolist()))
        table = torch.from_numpy(rows.page_tables[pool.group_of(KEY)])
        width = min(table.shape[1], self._table.shape[1])
        self._table[: len(rows), :width] = table[:, :width]

    def start_recorded(self, batch: ForwardBatch, pool: KvPool) -> DensePass:
        return DensePass(batch, pool, self._table[: batch.sequence_count])


class DensePass:
    """See `AttentionPass`; one new token a sequence. table: int64[B, pages] of keys and values."""

    def __init__(self, batch: ForwardBatch, pool: KvPool, table: Tensor) -> None:
        self._batch = batch
        self._pool = pool
        self._table = table
        self._writer = CacheWriter(batch, pool)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._writer.write(KEY, layer, key)
        self._writer.write(VALUE, layer, value)
        group = self._pool.group_of(KEY)
        table = self._table
        item = torch.arange(table.shape[1] * self._pool.page_items[group])
        mask = (item < self._batch.kv_lengths[:, None])[:, None, None]
        keys, values = (
            self._pool.view(part, layer)[table].transpose(1, 2).flatten(2, 3)
            for part in (KEY, VALUE)
        )
        # What lies behind a sequence's end may be anything, and 0 times NaN is NaN.
        values = values.masked_fill(~mask.transpose(-1, -2), 0.0)
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(
            query.shape
        )
