"""A slice of a weight as small numbers whose neighbours in a row share a factor.

What every format of quantised weights becomes once it is out of its files. Knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codes:
    """W[r, c] = (values[r, c] - zeros[r, g]) * scales[r, g], where g is the group of c.

    values: int8 or float8 [.., r, c]. scales, zeros: fp32[.., r, g]; zeros is None if all are 0.
    bits: of a value. is_float4: whether values are twice those of 4-bit floats. group_size:
    neighbours in a row that share a group, the first one included; 0 if `groups`, int64[c], says
    which group each column has.
    rounds_inputs: whether a product's inputs are meant to be rounded as well, token by token.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    groups: Tensor | None = None
    rounds_inputs: bool = False
    is_float4: bool = False

    def to(self, device: torch.device) -> Codes:
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            groups=None if self.groups is None else self.groups.to(device),
        )

    def widen(self) -> Tensor:
        """fp32[.., r, c]: exact, but for one rounding of each product."""
        wide = self.values.float()
        if self.zeros is not None:
            wide.sub_(self._by_column(self.zeros))
        return wide.mul_(self._by_column(self.scales))

    def of_expert(self, expert: int) -> Codes:
        """One [r, c] of a stack of weights [experts, r, c]."""
        return replace(
            self,
            values=self.values[expert],
            scales=self.scales[expert],
            zeros=None if self.zeros is None else self.zeros[expert],
        )

    @property
    def form(self) -> tuple[object, ...]:
        """What weights have in common that can lie in one tensor."""
        return (
            self.bits,
            self.is_float4,
            self.values.dtype,
            self.zeros is None,
            self.groups is None,
            self.group_size,
            self.scales.shape[-1],
            self.rounds_inputs,
        )

    def _by_column(self, of_groups: Tensor) -> Tensor:
        if self.groups is not None:
            return of_groups.index_select(-1, self.groups)
        if of_groups.shape[-1] == 1:
            return of_groups
        spread = of_groups[..., None].expand(*of_groups.shape, self.group_size).flatten(-2)
        return spread[..., : self.values.shape[-1]]


def join_rows(parts: Sequence[Codes]) -> Codes | None:
    """Rows of one weight below each other; None if they don't share a form."""
    first = parts[0]
    if len({part.form for part in parts}) > 1 or not all(has_groups_of(p, first) for p in parts):
        return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        values=torch.cat([part.values for part in parts], dim=-2),
        scales=torch.cat([part.scales for part in parts], dim=-2),
        zeros=torch.cat(zeros, dim=-2) if zeros else None,
    )


def has_groups_of(codes: Codes, other: Codes) -> bool:
    """Whether the columns of both are in the same groups."""
    if codes.groups is None or other.groups is None:
        return codes.groups is other.groups
    return torch.equal(codes.groups, other.groups)


def group_columns(
    scales: Tensor, columns: slice, column_count: int, group_size: int
) -> tuple[Tensor, Tensor | None]:
    """(scales of the groups that hold `columns`, the group of each if one of several is cut in
    front)."""
    start, stop, _ = columns.indices(column_count)
    held = scales[..., start // group_size : -(-stop // group_size)]
    if start % group_size == 0 or held.shape[-1] == 1:
        return held, None
    return held, torch.arange(start, stop) // group_size - start // group_size
