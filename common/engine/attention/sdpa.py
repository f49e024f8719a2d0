"""Attention by torch's scaled_dot_product_attention over gathered pages; runs on every device.

The path of CPU servers and the reference that other backends are checked against. Sequences with
one new token are attended together, in buckets of similar length; the others one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE, CacheWriter
from common.engine.attention.buckets import bucket_by_pages
from common.engine.forward_batch import ForwardBatch
from common.engine.kv_pool import (
    GatherIndex,
    Geometry,
    KvPool,
    Plane,
    Scratch,
    gather_index,
)


class SdpaAttention:
    """See `Attention`."""

    name = "sdpa"

    def __init__(self) -> None:
        self._scratch = (Scratch(), Scratch())

    def start(self, batch: ForwardBatch, pool: KvPool) -> SdpaPass:
        return SdpaPass(batch, pool, self._scratch)


@dataclass(frozen=True, slots=True)
class _Stale:
    """Gathered items that hold no token of their sequence: int64[n] each, sequence and item.

    A page's last owner may have left values there that are not finite. A mask makes their weight 0,
    but 0 times NaN is NaN, so they are zeroed.
    """

    sequences: Tensor
    items: Tensor


@dataclass(slots=True)
class _Gather:
    """A page table int64[B, pages], and the indexes made of it when they are first needed.

    indexes: per geometry, what to read, and the rows [B * unit * item] to zero in what was read.
    """

    page_table: Tensor
    stale: _Stale | None = None
    indexes: dict[Geometry, tuple[GatherIndex, Tensor | None]] = field(default_factory=dict)

    def read(self, plane: Plane, scratch: Scratch, dtype: torch.dtype) -> Tensor:
        """[B, unit, pages * page_items, element], good until `scratch` is used again."""
        if plane.geometry not in self.indexes:
            index = gather_index(plane.geometry, self.page_table)
            self.indexes[plane.geometry] = (index, self._stale_rows(plane.geometry))
        index, stale_rows = self.indexes[plane.geometry]
        gathered = plane.gather(index, scratch)
        if stale_rows is not None:
            rows = gathered.view(-1, gathered.shape[-1])
            rows.index_copy_(0, stale_rows, rows.new_zeros(len(stale_rows), rows.shape[1]))
        return plane.widen(gathered, dtype)

    def _stale_rows(self, geometry: Geometry) -> Tensor | None:
        if self.stale is None:
            return None
        units = torch.arange(geometry.unit_count, device=self.page_table.device)
        first = self.stale.sequences[:, None] * geometry.unit_count + units
        item_count = self.page_table.shape[1] * geometry.page_items
        return (first * item_count + self.stale.items[:, None]).reshape(-1)


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """The keys and values of one layer, and where to gather them."""

    keys: Plane
    values: Plane
    key_scratch: Scratch
    value_scratch: Scratch

    def read(self, gather: _Gather, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            gather.read(self.keys, self.key_scratch, dtype),
            gather.read(self.values, self.value_scratch, dtype),
        )


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Sequences with one new token each. rows: int64[B], their rows in the batch, None for all.

    mask: bool[B, 1, 1, items], True where a token is; None if nothing is padded.
    """

    rows: Tensor | None
    gather: _Gather
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several new tokens, rows first .. stop of the batch.

    mask: bool[new tokens, kv_length], True where a key may be seen; None if nothing was in the
        cache before, so that the new keys are all there are and the triangle is the whole rule.
    """

    first: int
    stop: int
    kv_length: int
    gather: _Gather
    mask: Tensor | None


class SdpaPass:
    """See `AttentionPass`."""

    def __init__(self, batch: ForwardBatch, pool: KvPool, scratch: tuple[Scratch, Scratch]) -> None:
        self._pool = pool
        self._scratch = scratch
        self._writer = CacheWriter(batch, pool)
        group = pool.group_of(KEY)
        assert pool.group_of(VALUE) == group
        self._page_items = pool.page_items[group]
        self._page_table = batch.page_tables[group].to(torch.int64)
        self._decodes: list[_DecodeBucket] = []
        self._chunks: list[_Chunk] = []
        self._plan(batch)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._writer.write(KEY, layer, key)
        self._writer.write(VALUE, layer, value)
        cache = _LayerCache(
            self._pool.plane(KEY, layer), self._pool.plane(VALUE, layer), *self._scratch
        )
        if not self._chunks and len(self._decodes) == 1 and self._decodes[0].rows is None:
            return _attend_decode(self._decodes[0], query, cache)
        output = torch.empty_like(query)
        for bucket in self._decodes:
            assert bucket.rows is not None
            output[bucket.rows] = _attend_decode(bucket, query[bucket.rows], cache)
        for chunk in self._chunks:
            rows = slice(chunk.first, chunk.stop)
            output[rows] = _attend_chunk(chunk, query[rows], key[rows], value[rows], cache)
        return output

    def _plan(self, batch: ForwardBatch) -> None:
        device = batch.token_ids.device
        first = 0
        decodes: list[int] = []
        decode_rows: list[int] = []
        for index, length in enumerate(batch.query_lengths):
            if length == 1:
                decodes.append(index)
                decode_rows.append(first)
            else:
                self._chunks.append(
                    self._plan_chunk(index, first, length, batch.kv_length_list[index], device)
                )
            first += length
        if not decodes:
            return
        lengths = [batch.kv_length_list[index] for index in decodes]
        page_counts = [-(-length // self._page_items) for length in lengths]
        buckets = bucket_by_pages(page_counts)
        is_all = len(buckets) == 1 and not self._chunks
        for bucket in buckets:
            rows = torch.tensor([decode_rows[i] for i in bucket], device=device)
            table = self._page_table
            if not is_all:
                table = table[torch.tensor([decodes[i] for i in bucket], device=device)]
            self._decodes.append(
                self._plan_bucket(
                    None if is_all else rows, table, torch.tensor([lengths[i] for i in bucket])
                )
            )

    def _plan_bucket(self, rows: Tensor | None, table: Tensor, lengths: Tensor) -> _DecodeBucket:
        """table: int64[B, pages] or wider; lengths: int64[B] on the CPU."""
        device = table.device
        items = self._page_items
        page_counts = (lengths + items - 1) // items
        width = int(page_counts.max())
        if bool((lengths == width * items).all()):
            return _DecodeBucket(rows, _Gather(table[:, :width]), None)
        # Padding reads the sequence's own first page again: full of its tokens, unless it is also
        # the last, and never another request's trouble.
        columns = torch.arange(width)
        columns = torch.where(columns < page_counts[:, None], columns, 0).to(device)
        ends = torch.where(page_counts == 1, width, page_counts) * items
        counts = ends - lengths
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        starts = counts.cumsum(0) - counts
        stale_items = lengths[sequences] + torch.arange(len(sequences)) - starts[sequences]
        is_token = torch.arange(width * items) < lengths[:, None]
        return _DecodeBucket(
            rows,
            _Gather(
                table.gather(1, columns),
                _Stale(sequences.to(device), stale_items.to(device)) if len(sequences) else None,
            ),
            is_token[:, None, None].to(device),
        )

    def _plan_chunk(
        self, index: int, first: int, length: int, kv_length: int, device: torch.device
    ) -> _Chunk:
        page_count = -(-kv_length // self._page_items)
        gather = _Gather(self._page_table[index : index + 1, :page_count])
        mask = None
        if length < kv_length:
            # New token i stands at position kv_length - length + i and sees itself and all before.
            positions = torch.arange(kv_length - length, kv_length, device=device)
            mask = torch.arange(kv_length, device=device)[None] <= positions[:, None]
        return _Chunk(first, first + length, kv_length, gather, mask)


def _attend_decode(bucket: _DecodeBucket, query: Tensor, cache: _LayerCache) -> Tensor:
    """query: [B, query heads, head dim]. A KV head's query heads are its rows of queries: they see
    the same keys, so grouped heads need no repeated keys."""
    keys, values = cache.read(bucket.gather, query.dtype)
    grouped = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask)
    return output.reshape(query.shape)


def _attend_chunk(
    chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor, cache: _LayerCache
) -> Tensor:
    """query: [new tokens, query heads, head dim]; key, value: the new ones."""
    if chunk.mask is None and cache.keys.view.dtype == key.dtype:
        # What the cache holds now is what was just computed, unless it is stored in less.
        keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    else:
        keys, values = (
            part[:, :, : chunk.kv_length] for part in cache.read(chunk.gather, query.dtype)
        )
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)
