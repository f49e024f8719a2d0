"""Attention by torch's scaled_dot_product_attention over gathered pages; runs on every device.

The path of CPU servers and the reference that other backends are checked against. Sequences with
one new token are attended together, in buckets of similar length; the others one by one. A layer
whose cache is a window gathers and sees the window only; its width is the cache's live rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE, CacheWriter
from common.engine.attention.buckets import bucket_by_pages, pages_at_once
from common.engine.attention.scores import PLAIN, ScoreRule, attend_scores
from common.engine.cache.kv_pool import (
    GatherIndex,
    Geometry,
    KvPool,
    Plane,
    Scratch,
    gather_index,
)
from common.engine.forward_batch import ForwardBatch
from common.engine.host_copy import upload
from common.layout.component import LiveKind

Ints = NDArray[np.int64]


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

    item_count: gathered items up to the last new token, from the start of the first page on.
    mask: bool[new tokens, item_count], True where a key may be seen; None if nothing was in the
        cache before and no window ends inside, so that the triangle is the whole rule.
    is_whole: the new keys are all that is seen.
    """

    first: int
    stop: int
    item_count: int
    gather: _Gather
    mask: Tensor | None
    is_whole: bool


@dataclass(slots=True)
class _GroupPlan:
    """Gathered rows and masks of the layers of one page group."""

    decodes: list[_DecodeBucket] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)


class SdpaPass:
    """See `AttentionPass`."""

    def __init__(self, batch: ForwardBatch, pool: KvPool, scratch: tuple[Scratch, Scratch]) -> None:
        self._batch = batch
        self._pool = pool
        self._scratch = scratch
        self._writer = CacheWriter(batch, pool)
        self._plans: dict[int, _GroupPlan] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule = PLAIN
    ) -> Tensor:
        """As `AttentionPass`; rule: what else is done to the scores of this layer."""
        self._writer.write(KEY, layer, key)
        self._writer.write(VALUE, layer, value)
        return self._attend(layer, query, (key, value), rule)

    def attend_shared(self, layer: int, query: Tensor, rule: ScoreRule = PLAIN) -> Tensor:
        """For a layer that owns no cache: attend to what `layer` has appended in this pass, and to
        all before it, as it does itself."""
        return self._attend(layer, query, None, rule)

    def _attend(
        self, layer: int, query: Tensor, new: tuple[Tensor, Tensor] | None, rule: ScoreRule
    ) -> Tensor:
        """new: keys and values of the batch's tokens, None if only the cache has them."""
        cache = _LayerCache(
            self._pool.plane(KEY, layer), self._pool.plane(VALUE, layer), *self._scratch
        )
        group = cache.keys.geometry.group
        assert cache.values.geometry.group == group
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = _GroupPlanner(self._batch, self._pool, group).plan()
        if not plan.chunks and len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            return _attend_decode(plan.decodes[0], query, cache, rule)
        output = torch.empty_like(query)
        for bucket in plan.decodes:
            assert bucket.rows is not None
            output[bucket.rows] = _attend_decode(bucket, query[bucket.rows], cache, rule)
        for chunk in plan.chunks:
            rows = slice(chunk.first, chunk.stop)
            parts = None if new is None else (new[0][rows], new[1][rows])
            output[rows] = _attend_chunk(chunk, query[rows], parts, cache, rule)
        return output


class _GroupPlanner:
    """Plans one page group. width: of its window in tokens, 0 if all of the past is seen."""

    def __init__(self, batch: ForwardBatch, pool: KvPool, group: int) -> None:
        live = pool.layout.groups[group].group.live
        assert live.kind in (LiveKind.FULL, LiveKind.WINDOW), live
        self._width = live.size
        self._batch = batch
        self._page_items = pool.page_items[group]
        cell = pool.layout.groups[group].cells[0]
        page_nbytes = 2 * len(cell.units) * self._page_items * cell.item_nbytes
        self._pages_at_once = pages_at_once(page_nbytes, batch.token_ids.device)
        self._page_table = batch.page_tables[group].to(torch.int64)

    def plan(self) -> _GroupPlan:
        batch, plan = self._batch, _GroupPlan()
        device = batch.token_ids.device
        first = 0
        decodes: list[int] = []
        decode_rows: list[int] = []
        for index, length in enumerate(batch.query_lengths):
            if length == 1:
                decodes.append(index)
                decode_rows.append(first)
            else:
                plan.chunks.append(
                    self._plan_chunk(index, first, length, batch.kv_length_list[index], device)
                )
            first += length
        if not decodes:
            return plan
        spans = [self._visible(batch.kv_length_list[index], 1) for index in decodes]
        page_counts = [-(-span.stop // self._page_items) - self._page_of(span) for span in spans]
        buckets = bucket_by_pages(page_counts, self._pages_at_once)
        if len(buckets) == 1 and not plan.chunks:
            plan.decodes.append(self._plan_bucket(None, self._page_table, spans))
            return plan
        for bucket in buckets:
            rows, sequences = upload(
                device, np.array(decode_rows)[bucket], np.array(decodes)[bucket]
            )
            table = self._page_table.index_select(0, sequences)
            plan.decodes.append(self._plan_bucket(rows, table, [spans[i] for i in bucket]))
        return plan

    def _visible(self, kv_length: int, new_count: int) -> range:
        """Positions that the last `new_count` of kv_length tokens see between them."""
        start = kv_length - new_count - self._width + 1 if self._width else 0
        return range(max(0, start), kv_length)

    def _page_of(self, span: range) -> int:
        return span.start // self._page_items

    def _plan_bucket(self, rows: Tensor | None, table: Tensor, spans: list[range]) -> _DecodeBucket:
        """table: int64[B, pages] or wider; spans: positions that each sequence sees."""
        items = self._page_items
        first_pages = np.array([self._page_of(span) for span in spans])
        starts = np.array([span.start for span in spans]) - first_pages * items
        stops = np.array([span.stop for span in spans]) - first_pages * items
        page_counts = -(-stops // items)
        width = int(page_counts.max())
        columns = np.arange(width)
        if (stops == width * items).all() and not starts.any():
            if not first_pages.any():
                return _DecodeBucket(rows, _Gather(table[:, :width]), None)
            (index,) = upload(table.device, first_pages[:, None] + columns)
            return _DecodeBucket(rows, _Gather(table.gather(1, index)), None)
        # Padding reads the sequence's own first page again: full of its tokens, unless it is also
        # the last or the window starts inside, and never another request's trouble.
        columns = np.where(columns < page_counts[:, None], columns, 0) + first_pages[:, None]
        is_first_full = (page_counts > 1) & (starts == 0)
        ends = np.where(is_first_full, page_counts, width) * items
        behind, before = _ranges(stops, ends), _ranges(np.zeros_like(starts), starts)
        item = np.arange(width * items)
        is_token = (item < stops[:, None]) & (item >= starts[:, None])
        index, mask, sequences, stale_items = upload(
            table.device,
            columns,
            is_token[:, None, None],
            *(np.concatenate(pair) for pair in zip(behind, before, strict=True)),
        )
        stale = _Stale(sequences, stale_items) if len(sequences) else None
        return _DecodeBucket(rows, _Gather(table.gather(1, index), stale), mask)

    def _plan_chunk(
        self, index: int, first: int, length: int, kv_length: int, device: torch.device
    ) -> _Chunk:
        span = self._visible(kv_length, length)
        first_page = self._page_of(span)
        start = first_page * self._page_items
        page_stop = -(-kv_length // self._page_items)
        stale_items = torch.arange(span.start - start, device=device)
        stale = _Stale(torch.zeros_like(stale_items), stale_items) if len(stale_items) else None
        gather = _Gather(self._page_table[index : index + 1, first_page:page_stop], stale)
        mask = None
        if length < kv_length or 0 < self._width < length:
            # New token i stands at position kv_length - length + i and sees itself and all before,
            # as far as the window reaches.
            positions = torch.arange(kv_length - length, kv_length, device=device)[:, None]
            keys = torch.arange(start, kv_length, device=device)[None]
            mask = keys <= positions
            if self._width:
                mask &= positions - keys < self._width
        return _Chunk(
            first, first + length, kv_length - start, gather, mask, is_whole=length == kv_length
        )


def _ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """(index, item) of every item in starts[index] .. stops[index]."""
    counts = stops - starts
    indexes = np.repeat(np.arange(len(counts)), counts)
    firsts = counts.cumsum() - counts
    return indexes, starts[indexes] + np.arange(len(indexes)) - firsts[indexes]


def _attend_decode(
    bucket: _DecodeBucket, query: Tensor, cache: _LayerCache, rule: ScoreRule
) -> Tensor:
    """query: [B, query heads, head dim]. A KV head's query heads are its rows of queries: they see
    the same keys, so grouped heads need no repeated keys."""
    keys, values = cache.read(bucket.gather, query.dtype)
    grouped = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
    sinks = rule.sinks
    if sinks is not None:
        sinks = sinks.view(keys.shape[1], -1, 1)
    output = attend_scores(grouped, keys, values, rule, sinks=sinks, mask=bucket.mask)
    return output.reshape(query.shape)


def _attend_chunk(
    chunk: _Chunk,
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    cache: _LayerCache,
    rule: ScoreRule,
) -> Tensor:
    """query: [new tokens, query heads, head dim]; new: their keys and values, if at hand."""
    if new is not None and chunk.is_whole and cache.keys.view.dtype == query.dtype:
        # The cache now holds the rows just computed, unless it stores a narrower type.
        keys, values = (part.transpose(0, 1)[None] for part in new)
    else:
        keys, values = (
            part[:, :, : chunk.item_count] for part in cache.read(chunk.gather, query.dtype)
        )
    sinks = rule.sinks
    if sinks is not None:
        sinks = sinks.view(-1, 1, 1)
    output = attend_scores(
        query.transpose(0, 1)[None],
        keys,
        values,
        rule,
        sinks=sinks,
        mask=chunk.mask,
        is_causal=chunk.mask is None,
    )
    return output[0].transpose(0, 1)
