"""RMSNorm over groups of features, with a gate before or behind it, cut over tensor parallel ranks.

A group that several ranks share is normalised by what all of them see of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.layers.layer_context import LayerContext


class GateStyle(StrEnum):
    """When the gate is applied: before the norm, after it, or without a norm."""

    BEFORE_NORM = "before norm"
    BEHIND_NORM = "behind norm"
    NO_NORM = "no norm"


class GatedGroupNorm:
    """Everything in fp32, whatever the model's dtype; the weight is kept so as well.

    name: without ".weight". size: features of the whole model, `group_count` groups of them.
    activation: of the gate.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        size: int,
        group_count: int,
        epsilon: float,
        style: GateStyle,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        parallel = context.parallel
        self.parallel = parallel
        self.name = name
        self.size = size
        self.group_count = group_count
        self.epsilon = epsilon
        self.style = style
        self.activation = activation
        self.channels = context.cut(size)
        self.groups = context.share(group_count)
        self.is_group_torn = group_count < parallel.tp_size
        self.weight = context.empty_fp32(len(self.channels))

    def __call__(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """fp32 of both [T, features of this rank]."""
        weight = self.activation(gate.float())
        if self.style is GateStyle.NO_NORM:
            return hidden.float() * weight
        if self.style is GateStyle.BEFORE_NORM:
            return self._normalize(hidden.float() * weight) * self.weight
        return self._normalize(hidden.float()) * self.weight * weight

    def weights(self) -> Iterator[Weight]:
        if self.style is not GateStyle.NO_NORM:
            yield Weight.cut(f"{self.name}.weight", self.size, self.channels, self.weight)

    def _normalize(self, hidden: Tensor) -> Tensor:
        groups = hidden.view(len(hidden), len(self.groups), -1)
        squares = groups.pow(2)
        if self.is_group_torn:
            # Every rank has a part of one group and adds it to that group's sum.
            sums = hidden.new_zeros(len(hidden), self.group_count)
            sums[:, self.groups.start] = squares.sum(dim=(1, 2))
            sums = self.parallel.all_reduce(sums)[:, self.groups.start : self.groups.stop]
            means = sums[:, :, None] / (self.size // self.group_count)
        else:
            means = squares.mean(dim=-1, keepdim=True)
        return (groups * torch.rsqrt(means + self.epsilon)).view(hidden.shape)
