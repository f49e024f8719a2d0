"""A step without what can't run, as arrays, and which logits of its forward pass are wanted.

Knows nothing of models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from common.engine.sequence_table import Slots
from common.engine.speculation.decode_rows import DecodeRows
from common.protocol.worker import PrefillChunk


@dataclass(frozen=True)
class StepWork:
    """chunks, then decodes, in the order of the forward batch. Rows of the logits come in this
    order: last chunks, decodes with their proposals, then the prompt rows of each entry of
    `prompt_rows`.

    sampled_slots: int64[R] of the sequences that draw a token whatever is proposed; samples of one
    chunk have equal rows. prompt_rows: (chunk, first row, end row) in tokens of the sequence, whose
    next token is scored.
    """

    chunks: list[PrefillChunk]
    chunk_slots: Slots
    decodes: DecodeRows
    sampled_slots: Slots
    prompt_rows: list[tuple[PrefillChunk, int, int]]

    @property
    def is_empty(self) -> bool:
        return not len(self.chunk_slots) and not len(self.decodes.slots)

    @property
    def prompt_draw_count(self) -> int:
        """Rows of the logits before those of decodes."""
        return len(self.sampled_slots) - len(self.decodes.slots)

    @property
    def decode_logits(self) -> slice:
        """Rows of the logits that are those of decodes and their proposals."""
        first = self.prompt_draw_count
        return slice(first, first + len(self.decodes.row_slots))

    @property
    def first_logits(self) -> NDArray[np.int64]:
        """int64[R], of the sampled slots."""
        first = self.prompt_draw_count
        return np.concatenate((np.arange(first), first + self.decodes.first_rows))

    @cached_property
    def query_lengths(self) -> list[int]:
        """Tokens of each sequence of the forward batch: chunks, then rows of decodes."""
        lengths = [chunk.stop - chunk.start for chunk in self.chunks]
        return lengths + [1] * len(self.decodes.row_slots)

    def drawn_rows(self) -> list[int]:
        """Rows of the batch's tokens behind which the sampled slots draw."""
        rows: list[int] = self.logits_rows()[self.first_logits].tolist()
        return rows

    def logits_rows(self) -> NDArray[np.int64]:
        """Rows of the batch's tokens whose logits are wanted, in the order of the logits."""
        ends = np.cumsum([chunk.stop - chunk.start for chunk in self.chunks], dtype=np.int64)
        chunk_end = int(ends[-1]) if len(ends) else 0
        draw_counts = np.array([len(chunk.drawing) for chunk in self.chunks], dtype=np.int64)
        decode_rows = np.arange(chunk_end, chunk_end + len(self.decodes.row_slots))
        rows = [np.repeat(ends - 1, draw_counts), decode_rows]
        end_of = {chunk.request_id: int(end) for chunk, end in zip(self.chunks, ends, strict=True)}
        for chunk, start, stop in self.prompt_rows:
            offset = end_of[chunk.request_id] - chunk.stop
            rows.append(np.arange(offset + start, offset + stop))
        return np.concatenate(rows)
