"""A step without what can't run, as arrays, and which logits of its forward pass are wanted.

Knows nothing of models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.sequence_table import Slots
from common.protocol.worker import PrefillChunk


@dataclass(frozen=True, slots=True)
class StepWork:
    """chunks, then decodes, in the order of the forward batch. Rows of the logits come in this
    order: last chunks, decodes, then the prompt rows of each entry of `prompt_rows`.

    sampled_slots: int64[R] of the rows that draw a token; samples of one chunk have equal rows.
    prompt_rows: (chunk, first row, end row) in tokens of the sequence, whose next token is scored.
    """

    chunks: list[PrefillChunk]
    chunk_slots: Slots
    decode_slots: Slots
    sampled_slots: Slots
    prompt_rows: list[tuple[PrefillChunk, int, int]]

    def logits_rows(self) -> NDArray[np.int64]:
        """Rows of the batch's tokens whose logits are wanted, in the order of the logits."""
        ends = np.cumsum([chunk.stop - chunk.start for chunk in self.chunks], dtype=np.int64)
        chunk_end = int(ends[-1]) if len(ends) else 0
        draw_counts = np.array([len(chunk.drawing) for chunk in self.chunks], dtype=np.int64)
        decode_rows = np.arange(chunk_end, chunk_end + len(self.decode_slots))
        rows = [np.repeat(ends - 1, draw_counts), decode_rows]
        end_of = {chunk.request_id: int(end) for chunk, end in zip(self.chunks, ends, strict=True)}
        for chunk, start, stop in self.prompt_rows:
            offset = end_of[chunk.request_id] - chunk.stop
            rows.append(np.arange(offset + start, offset + stop))
        return np.concatenate(rows)
