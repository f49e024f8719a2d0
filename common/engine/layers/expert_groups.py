"""Rows in the order of their experts, and their product with each one's weights.

Where torch has one kernel for all experts, it is taken. Where it has none, the host would have to
ask how many rows each expert has, which waits for the device and can't be recorded; so as few rows
as decodes have are multiplied with what the host knows without asking.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_ALIGNMENT_NBYTES = 16
"""Alignment of strides for torch.nn.functional.grouped_mm, in bytes."""

PADDED_ROWS_MAX = 1024
"""Rows of one expert up to which all experts are given as many: reading weights takes longer than
multiplying so few rows by them, and above it a product for each expert is no longer short."""

BY_ROW_SHARE = 3
"""Rows times this that still are fewer than the experts are multiplied one by one: the weights of
each are copied, so read, written and read again, which is less than those of all experts."""

BY_ROW_NBYTES = 256 << 20
"""Weights that are copied at once."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """n rows in the order of their experts.

    experts: int64[n], ascending. ends: int32[experts], behind the last row of each.
    row_max: rows that one expert may have. has_kernel: see `has_grouped_kernel`.
    """

    experts: Tensor
    ends: Tensor
    row_max: int
    has_kernel: bool

    @staticmethod
    def of(experts: Tensor, expert_count: int, *, row_max: int, has_kernel: bool) -> ExpertGroups:
        # Not bincount: on a GPU the host waits for it.
        counts = experts.new_zeros(expert_count).scatter_add_(0, experts, torch.ones_like(experts))
        return ExpertGroups(experts, counts.cumsum(0).to(torch.int32), row_max, has_kernel)

    def multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [n, in] times each one's expert of weights [experts, out, in]: [n, out]."""
        if self.has_kernel and _is_aligned(weights):
            return F.grouped_mm(rows, weights.transpose(1, 2), offs=self.ends)
        if BY_ROW_SHARE * len(rows) < len(weights):
            return self.multiply_by_row(rows, weights)
        if self.row_max <= PADDED_ROWS_MAX:
            return self.multiply_padded(rows, weights)
        return self.multiply_by_expert(rows, weights)

    def multiply_by_row(self, rows: Tensor, weights: Tensor) -> Tensor:
        """As `multiply`, each row with a copy of its weights."""
        step = max(1, BY_ROW_NBYTES // weights[0].nbytes)
        parts = [
            torch.bmm(rows[i : i + step, None], weights[self.experts[i : i + step]].transpose(1, 2))
            for i in range(0, len(rows), step)
        ]
        return torch.cat(parts)[:, 0]

    def multiply_padded(self, rows: Tensor, weights: Tensor) -> Tensor:
        """As `multiply`, where every expert has `row_max` rows, most of them for nothing."""
        count, size = len(weights), self.row_max
        starts = F.pad(self.ends, (1, 0))[:-1]
        rank = torch.arange(len(rows), device=rows.device) - starts[self.experts]
        places = self.experts * size + rank
        padded = rows.new_zeros(count * size, rows.shape[1]).index_copy_(0, places, rows)
        products = torch.bmm(padded.view(count, size, -1), weights.transpose(1, 2))
        return products.flatten(0, 1)[places]

    def multiply_by_expert(self, rows: Tensor, weights: Tensor) -> Tensor:
        """As `multiply`, expert by expert: asks the device for the ends."""
        outputs = rows.new_empty(len(rows), weights.shape[1])
        first = 0
        for expert, end in enumerate(self.ends.tolist()):
            if first < end:
                torch.mm(rows[first:end], weights[expert].t(), out=outputs[first:end])
            first = end
        return outputs


@cache
def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies all groups without asking the device how long they are.

    On CUDA it depends on the card and on the dtype, so it is tried: torch's other path copies the
    ends to the host. On a CPU the same products are a loop of torch's own.
    """
    if device.type != "cuda":
        return True
    rows = torch.zeros(2, GROUP_ALIGNMENT_NBYTES, dtype=dtype, device=device)
    weights = torch.zeros(2, *rows.shape[1:] * 2, dtype=dtype, device=device)
    ends = torch.arange(1, 3, dtype=torch.int32, device=device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def _is_aligned(weights: Tensor) -> bool:
    """Whether the rows that go in, and those that come out, are of whole 16 bytes."""
    return all(
        size * weights.element_size() % GROUP_ALIGNMENT_NBYTES == 0 for size in weights.shape[1:]
    )
