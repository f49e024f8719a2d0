"""Decode passes that are recorded once and replayed: of fixed batch sizes, over tensors that stay.

A pass that decodes a few sequences launches hundreds of kernels that take microseconds each, and
launching them takes longer than running them. A recorded pass is launched at once. It reads and
writes the same memory every time, so a batch is copied into the recording's inputs, filled up to
the next recorded size with padding rows, which read and write the scratch page. Attention's plans
on the host are made anew before each replay.

Knows nothing of requests or steps. The recorder is given: CUDA graphs (`cuda_graphs.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.attention import RecordableAttention
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, token_places
from common.engine.graphs.recording import Record, Recording
from common.engine.models.causal_lm import CausalLm
from common.layout.cache_layout import PageGroup

FILL_TOKEN = 0
FILL_LENGTH = 2
"""A padding row is a sequence's second token. It has a past, as every row of a decode pass has, so
its state is not taken for that of a new sequence."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where recordings find their batch: one of B rows in the first B.

    token_ids, lengths: int64[B]; page_tables: one int32[B, pages] per page group.
    """

    token_ids: Tensor
    lengths: Tensor
    page_tables: tuple[Tensor, ...]

    @staticmethod
    def allocate(row_count: int, page_counts: Sequence[int], device: torch.device) -> _Place:
        return _Place(
            torch.full((row_count,), FILL_TOKEN, dtype=torch.int64, device=device),
            torch.full((row_count,), FILL_LENGTH, dtype=torch.int64, device=device),
            tuple(
                torch.zeros((row_count, count), dtype=torch.int32, device=device)
                for count in page_counts
            ),
        )

    def take(self, batch: ForwardBatch) -> None:
        """The batch's rows come first. Columns behind a table's width keep what they had: no
        length reaches them."""
        count = batch.sequence_count
        self.token_ids[:count].copy_(batch.token_ids)
        self.lengths[:count].copy_(batch.kv_lengths)
        for table, given in zip(self.page_tables, batch.page_tables, strict=True):
            width = min(table.shape[1], given.shape[1])
            table[:count, :width].copy_(given[:, :width])

    def clear(self, rows: slice) -> None:
        """Make these rows padding again."""
        self.token_ids[rows].fill_(FILL_TOKEN)
        self.lengths[rows].fill_(FILL_LENGTH)
        for table in self.page_tables:
            table[rows].zero_()

    def batch(self, kv_lengths: Sequence[int], groups: Sequence[PageGroup]) -> ForwardBatch:
        """The first rows as a pass that decodes; kv_lengths: of each, as the host knows them.

        Nothing is copied from the host, so that a recording computes it all from this place.
        """
        count = len(kv_lengths)
        rows = torch.arange(count, device=self.token_ids.device)
        lengths = self.lengths[:count]
        positions = lengths - 1
        tables = tuple(table[:count] for table in self.page_tables)
        places = [
            token_places(table, group, positions, rows, lengths)
            for table, group in zip(tables, groups, strict=True)
        ]
        return ForwardBatch(
            token_ids=self.token_ids[:count],
            positions=positions,
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            starts=positions.to(torch.int32),
            kv_lengths=lengths.to(torch.int32),
            page_tables=tables,
            token_pages=tuple(pages for pages, _ in places),
            token_rows=tuple(page_rows for _, page_rows in places),
            logits_rows=rows,
            query_lengths=(1,) * count,
            start_list=tuple(length - 1 for length in kv_lengths),
            kv_length_list=tuple(kv_lengths),
        )


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
        self._filled_count = 0
        length_max = max(token_max, FILL_LENGTH)
        page_counts = [group.page_end(length_max) for group in pool.groups]
        attention.reserve(self.batch_sizes, max(page_counts))
        device, row_count = model.context.device, self.batch_sizes[-1]
        self._place = _Place.allocate(row_count, page_counts, device)
        # One for all sizes: each with its own would take gigabytes where a vocabulary is large.
        self._logits = torch.empty(
            (row_count, model.config.vocab_size), dtype=torch.float32, device=device
        )
        self._recorded = {
            batch_size: self._record(record, batch_size)
            for batch_size in reversed(self.batch_sizes)
        }

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor | None:
        """float32 logits [B, vocabulary] of a batch that only decodes, a row for each sequence.

        Good until the next call, of whatever size. None if no recording is large enough; nothing
        has happened then.
        """
        assert batch.is_decode_only
        count = batch.sequence_count
        index = bisect_left(self.batch_sizes, count)
        if index == len(self.batch_sizes):
            return None
        batch_size = self.batch_sizes[index]
        self._place.take(batch)
        if count < self._filled_count:
            self._place.clear(slice(count, self._filled_count))
        self._filled_count = count
        lengths = (*batch.kv_length_list, *[FILL_LENGTH] * (batch_size - count))
        self._attention.plan_recorded(self._place.batch(lengths, self._pool.groups), self._pool)
        recording = self._recorded[batch_size]
        recording.replay()
        return recording.output[:count]

    def _record(self, record: Record, batch_size: int) -> Recording:
        lengths = [FILL_LENGTH] * batch_size

        def compute() -> Tensor:
            batch = self._place.batch(lengths, self._pool.groups)
            attention_pass = self._attention.start_recorded(batch, self._pool)
            logits = self._model.compute(batch, self._pool, attention_pass)
            assert logits is not None, "a stage without the head has nothing to record"
            return self._logits[:batch_size].copy_(logits)

        with torch.inference_mode():
            self._attention.plan_recorded(self._place.batch(lengths, self._pool.groups), self._pool)
            return record(compute)
