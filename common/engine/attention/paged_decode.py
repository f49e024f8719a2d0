"""Sequences with one new token, attended by the CPU's own kernel where their pages lie.

Nothing is gathered, padded or masked, and what a sequence gets does not depend on the others. Knows
nothing of buckets and of chunks; `sdpa.py` has what this kernel does not take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine import cpu_kernels
from common.engine.attention.scores import ScoreRule
from common.engine.forward_batch import ForwardBatch
from common.engine.kv_pool import Plane


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """What the layers of one page group have in common; see `cpu_kernels.attend`."""

    rows: Tensor
    page_table: Tensor
    lengths: Tensor
    window: int

    @staticmethod
    def of_all(batch: ForwardBatch, group: int, window: int) -> PagedDecode:
        """Of a batch that only decodes."""
        rows = torch.arange(batch.sequence_count)
        return PagedDecode(rows, batch.page_tables[group], batch.kv_lengths, window)

    @staticmethod
    def of_some(
        batch: ForwardBatch, sequences: list[int], rows: list[int], group: int, window: int
    ) -> PagedDecode:
        """Of the sequences of a mixed batch that have one new token; rows: where those lie."""
        index = torch.tensor(sequences)
        return PagedDecode(
            torch.tensor(rows), batch.page_tables[group][index], batch.kv_lengths[index], window
        )

    def attend(
        self, output: Tensor, query: Tensor, keys: Plane, values: Plane, rule: ScoreRule
    ) -> None:
        """Write these rows of output [T, query heads, dim]."""
        cpu_kernels.attend(
            output,
            query,
            keys.view,
            values.view,
            rows=self.rows,
            page_table=self.page_table,
            lengths=self.lengths,
            window=self.window,
            scale=rule.scale if rule.scale is not None else query.shape[-1] ** -0.5,
        )


def is_taken(query: Tensor, keys: Plane, values: Plane, rule: ScoreRule) -> bool:
    """Whether the kernel takes a layer: plain softmax over rows of a type that it reads."""
    is_plain = rule.softcap == 0.0 and rule.sinks is None
    return is_plain and cpu_kernels.can_attend(query, keys.view, values.view)
