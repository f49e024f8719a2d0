"""Tokens in the order of their experts, so that each expert is one product, and the way back.

`PlainOrder` spells both out in torch; `FusedOrder` has a kernel for each (`triton_experts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.layers.expert_groups import ExpertGroups
from common.engine.layers.fused_experts import ExpertKernels


@dataclass(frozen=True, slots=True)
class Beside:
    """What is added to what a token's experts make: [T, size], times the sigmoid of gate [T, 1]."""

    output: Tensor
    gate: Tensor | None = None

    def value(self) -> Tensor:
        return self.output if self.gate is None else self.gate.sigmoid() * self.output


class ExpertOrder(Protocol):
    """rows: [T * k, size], a copy of a token's row for each of its experts, in their order."""

    @property
    def rows(self) -> Tensor: ...

    @property
    def groups(self) -> ExpertGroups: ...

    def combine(self, outputs: Tensor, shares: Tensor, beside: Beside | None) -> Tensor:
        """[T, size]: outputs [T * k, size] of the rows, summed by the shares [T, k] of their
        tokens."""
        ...


class PlainOrder:
    """See `ExpertOrder`. experts: int[T, k]. row_max, has_kernel: see `ExpertGroups`."""

    def __init__(
        self,
        hidden: Tensor,
        experts: Tensor,
        expert_count: int,
        *,
        row_max: int,
        has_kernel: bool,
    ) -> None:
        by_choice = experts.flatten()
        self._order = by_choice.argsort(stable=True)
        self.groups = ExpertGroups.of(
            by_choice[self._order], expert_count, row_max=row_max, has_kernel=has_kernel
        )
        self.rows = hidden[self._order // experts.shape[1]]

    def combine(self, outputs: Tensor, shares: Tensor, beside: Beside | None) -> Tensor:
        # A token's experts are summed in the order of its own top-k, whatever else is in the batch.
        by_token = torch.empty_like(outputs)
        by_token[self._order] = outputs
        by_token = by_token.view(*shares.shape, -1)
        summed = (by_token * shares[:, :, None]).sum(dim=1).to(outputs.dtype)
        return summed if beside is None else summed + beside.value()


class FusedOrder:
    """See `PlainOrder`."""

    def __init__(
        self,
        kernels: ExpertKernels,
        hidden: Tensor,
        experts: Tensor,
        expert_count: int,
        *,
        row_max: int,
        has_kernel: bool,
    ) -> None:
        self._kernels = kernels
        self.rows, ordered, ends, self._places = kernels.arrange(hidden, experts, expert_count)
        self.groups = ExpertGroups(ordered, ends, row_max, has_kernel)

    def combine(self, outputs: Tensor, shares: Tensor, beside: Beside | None) -> Tensor:
        if beside is None:
            return self._kernels.combine(outputs, shares, self._places)
        return self._kernels.combine(outputs, shares, self._places, beside.output, beside.gate)
