"""Decode passes that are recorded once and replayed: of fixed batch sizes, over tensors that stay.

A pass that decodes a few sequences launches hundreds of kernels that take microseconds each, and
launching them takes longer than running them. A recorded pass is launched at once. It reads and
writes the same memory every time, so a batch is copied into the recording's inputs, filled up with
padding rows, which read and write the scratch page. Attention's plans on the host are made anew
before each replay, from the lengths and page tables that the host has.

Knows nothing of requests or steps. The recorder is given: CUDA graphs (`cuda_graphs.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.engine.ascending import Ascending
from common.engine.attention.attention import RecordableAttention
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, HostRows
from common.engine.graphs.recording import Record, Recording
from common.engine.host_copy import Array, pack, unpack, upload_into
from common.engine.models.causal_lm import CausalLm
from common.layout.cache_layout import PageGroup

FILL_TOKEN = 0
FILL_LENGTH = 2
"""A padding row is a sequence's second token. It has a past, as every row of a decode pass has, so
its state is not taken for that of a new sequence."""


class _Place:
    """Where recordings find their batch: one of B rows in the first B.

    What the host knows of a batch comes in one copy, padding rows included.
    """

    def __init__(self, row_count: int, groups: Sequence[PageGroup], device: torch.device) -> None:
        self._groups = groups
        self._row_count = row_count
        self._ascending = Ascending(device)
        self._query_starts = self._ascending.first(row_count + 1)
        self.token_ids = torch.full((row_count,), FILL_TOKEN, dtype=torch.int64, device=device)
        columns = [1 if not group.live.is_paged else 0 for group in groups]
        tables = tuple(np.zeros((row_count, count), dtype=np.int32) for count in columns)
        empty = HostRows(np.zeros(0, dtype=np.int64), tuple(table[:0] for table in tables))
        arrays = self._arrays(empty.filled(row_count, FILL_LENGTH, groups))
        self._memory = pack(arrays, is_pinned=False).to(device)
        self._numbers = unpack(self._memory, arrays)

    def take(self, rows: HostRows, tokens: Tensor, index: Tensor) -> None:
        """rows: as many as there may be. index: where the tokens of the first ones are."""
        upload_into(self._memory, *self._arrays(rows))
        torch.index_select(tokens, 0, index, out=self.token_ids[: len(index)])

    def batch(self, count: int) -> ForwardBatch:
        """The first rows as a pass that decodes; nothing is copied or computed for it.

        Lengths that the host knows are those of padding, and no table is there of pages that grow
        in number with the tokens: attention has planned both.
        """
        positions, lengths, starts, *of_groups = (part[:count] for part in self._numbers)
        tables, pages, rows = of_groups[::3], of_groups[1::3], of_groups[2::3]
        return ForwardBatch(
            token_ids=self.token_ids[:count],
            positions=positions,
            query_starts=self._query_starts[: count + 1],
            starts=starts,
            kv_lengths=lengths,
            page_tables=tuple(tables),
            token_pages=tuple(pages),
            token_rows=tuple(rows),
            logits_rows=None,
            query_lengths=(1,) * count,
            start_list=(FILL_LENGTH - 1,) * count,
            kv_length_list=(FILL_LENGTH,) * count,
        )

    def _arrays(self, rows: HostRows) -> list[Array]:
        """Positions, lengths and starts of all rows; then table, pages and rows of each group."""
        assert len(rows) == self._row_count
        starts = rows.lengths - 1
        arrays: list[Array] = [starts, rows.lengths.astype(np.int32), starts.astype(np.int32)]
        for index, group in enumerate(self._groups):
            width = 0 if group.live.is_paged else 1
            arrays += [rows.page_tables[index][:, :width], *rows.places(index, group)]
        return arrays


class DecodeGraphs:
    """Recorded decode passes of one model over one pool. Written by the thread that runs the model.

    batch_sizes: recorded sizes, ascending. A batch in between is filled up, a larger one is
    not served.
    """

    def __init__(
        self,
        model: CausalLm,
        pool: KvPool,
        attention: RecordableAttention,
        record: Record,
        *,
        batch_sizes: Sequence[int],
        token_max: int,
    ) -> None:
        """Records all sizes, the largest first, so that the others fit into its memory.

        token_max: tokens of a sequence at most. What can't be recorded raises what `record` or a
        kernel raises.
        """
        assert batch_sizes and list(batch_sizes) == sorted(set(batch_sizes)), batch_sizes
        self.batch_sizes = tuple(batch_sizes)
        self._model = model
        self._pool = pool
        self._attention = attention
        length_max = max(token_max, FILL_LENGTH)
        page_max = max(group.page_end(length_max) for group in pool.groups)
        attention.reserve(self.batch_sizes, page_max)
        device, row_count = model.context.device, self.batch_sizes[-1]
        self._place = _Place(row_count, pool.groups, device)
        # One for all sizes: each with its own would take gigabytes where a vocabulary is large.
        self._logits = torch.empty(
            (row_count, model.config.vocab_size), dtype=torch.float32, device=device
        )
        self._recorded = {
            batch_size: self._record(record, batch_size)
            for batch_size in reversed(self.batch_sizes)
        }

    @torch.inference_mode()
    def run(self, rows: HostRows, tokens: Tensor, index: Tensor) -> Tensor | None:
        """float32 logits [B, vocabulary], a row for each sequence.

        tokens: int64, some on the device; index: int64[B] there, which of them are the rows'.
        Good until the next call, of whatever size. None if no recording is large enough; nothing
        has happened then.
        """
        count = len(rows)
        place = bisect_left(self.batch_sizes, count)
        if place == len(self.batch_sizes):
            return None
        batch_size = self.batch_sizes[place]
        filled = rows.filled(self.batch_sizes[-1], FILL_LENGTH, self._pool.groups)
        self._place.take(filled, tokens, index)
        self._attention.plan_recorded(filled.first(batch_size), self._pool)
        recording = self._recorded[batch_size]
        recording.replay()
        return recording.output[:count]

    def _record(self, record: Record, batch_size: int) -> Recording:
        groups = self._pool.groups
        nothing = tuple(np.zeros((0, 0), dtype=np.int32) for _ in groups)
        rows = HostRows(np.zeros(0, dtype=np.int64), nothing)

        def compute() -> Tensor:
            batch = self._place.batch(batch_size)
            attention_pass = self._attention.start_recorded(batch, self._pool)
            logits = self._model.compute(batch, self._pool, attention_pass)
            assert logits is not None, "a stage without the head has nothing to record"
            return self._logits[:batch_size].copy_(logits)

        with torch.inference_mode():
            filled = rows.filled(batch_size, FILL_LENGTH, groups)
            self._attention.plan_recorded(filled, self._pool)
            return record(compute)
