"""Routed experts: softmax router, top-k, each expert a gated MLP.

Every rank routes alike and computes a slice of every expert's inner features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.config.model import MoeConfig
from common.engine.layers.block_moe import WholeExperts
from common.engine.layers.expert_groups import ExpertGroups, has_grouped_kernel
from common.engine.layers.expert_order import Beside, ExpertOrder, FusedOrder, PlainOrder
from common.engine.layers.fused_experts import SoftmaxRouter
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import Activation, fastest, gated_silu
from common.engine.layers.routing import route_softmax


class MoeMlp:
    """hidden [T, hidden] to the same shape; stands where a plain MLP would.

    is_gated: whether experts have a gate beside what they project up; then `activation` is given
    both side by side, else one alone.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        hidden_size: int,
        moe: MoeConfig,
        activation: Activation = gated_silu,
        is_gated: bool = True,
    ) -> None:
        self.parts = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
        self.name = name
        self.parallel = context.parallel
        self.hidden_size = hidden_size
        self.intermediate_size = moe.intermediate_size
        self.expert_count = moe.expert_count
        self.experts_per_token = moe.experts_per_token
        self.is_normalized = moe.is_normalized
        self.inner = context.cut(moe.intermediate_size)
        inner_size = len(self.inner)
        self.activation = fastest(activation, context, inner_size)
        self.has_grouped_kernel = has_grouped_kernel(context.device, context.dtype)
        self.kernels = None if context.fused is None else context.fused.experts
        self.softmax = SoftmaxRouter(moe.expert_count, moe.experts_per_token, moe.is_normalized)
        self.router = context.empty(moe.expert_count, hidden_size)
        self.gate_up = context.expert_matrix(
            moe.expert_count, len(self.parts) * inner_size, hidden_size
        )
        self.down = context.expert_matrix(moe.expert_count, hidden_size, inner_size)
        self.whole: WholeExperts | None = None
        if activation is gated_silu and is_gated and context.dtype == torch.bfloat16:
            self.whole = WholeExperts(self.gate_up, self.down)
            context.matrices.insert(len(context.matrices) - 2, self.whole)

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, experts = self.route(hidden)
        return self.mix_experts(hidden, shares, experts, beside=self.beside(hidden))

    def beside(self, hidden: Tensor) -> Beside | None:
        """What every token takes beside its experts."""
        return None

    def mix_experts(
        self,
        hidden: Tensor,
        shares: Tensor,
        experts: Tensor,
        *,
        is_distinct: bool = True,
        beside: Beside | None = None,
    ) -> Tensor:
        """Outputs of each token's experts, summed by their shares; both [T, k].

        is_distinct: whether no token has an expert twice. beside: of all ranks.
        """
        if self.whole is not None and self.whole.is_taken:
            mixed = self.parallel.all_reduce(self.whole(hidden, shares, experts))
            return mixed if beside is None else mixed + beside.value()
        order = self.order(hidden, experts, is_distinct=is_distinct)
        groups = order.groups
        outputs = self.down.multiply(groups, self.activation(self.expand(order.rows, groups)))
        if self.parallel.tp_size == 1:
            return order.combine(outputs, shares, beside)
        mixed = self.parallel.all_reduce(order.combine(outputs, shares, None))
        return mixed if beside is None else mixed + beside.value()

    def order(self, hidden: Tensor, experts: Tensor, *, is_distinct: bool) -> ExpertOrder:
        """Tokens brought into the order of their experts [T, k]."""
        row_max = len(hidden) if is_distinct else experts.numel()
        count, has_kernel = self.expert_count, self.has_grouped_kernel
        if self.kernels is not None and self.kernels.takes(experts, count):
            return FusedOrder(
                self.kernels, hidden, experts, count, row_max=row_max, has_kernel=has_kernel
            )
        return PlainOrder(hidden, experts, count, row_max=row_max, has_kernel=has_kernel)

    def expand(self, hidden: Tensor, groups: ExpertGroups) -> Tensor:
        """Gates and ups [n, 2 inner] of rows in expert order."""
        return self.gate_up.multiply(groups, hidden)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(shares [T, k] in the model's dtype or fp32, expert ids [T, k]) of every token."""
        logits = F.linear(hidden, self.router)
        if self.kernels is not None and self.softmax in self.kernels.routers and len(hidden):
            return self.kernels.route_softmax(self.softmax, logits)
        return route_softmax(self.softmax, logits)

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.gate.weight", self.router)
        yield from self.expert_weights()

    def expert_weights(self) -> Iterator[Weight]:
        yield Weight((self._gate_up_per_expert(), self._gate_up_stacked()))
        yield Weight((self._down_per_expert(), self._down_stacked()))

    def _gate_up_per_expert(self) -> tuple[TensorSlice, ...]:
        shape = (self.intermediate_size, self.hidden_size)
        rows = slice(self.inner.start, self.inner.stop)
        width = len(self.inner)
        return tuple(
            TensorSlice(
                f"{self.name}.experts.{expert}.{part}.weight",
                shape,
                (rows, slice(None)),
                self.gate_up.rows[expert, place * width : (place + 1) * width],
                keeper=self.gate_up.experts[expert],
            )
            for expert in range(self.expert_count)
            for place, part in enumerate(self.parts)
        )

    def _gate_up_stacked(self) -> tuple[TensorSlice, ...]:
        """[expert, 2 n, hidden], the gate's rows first; [expert, n, hidden] without gates."""
        size = self.intermediate_size
        shape = (self.expert_count, len(self.parts) * size, self.hidden_size)
        width = len(self.inner)
        name = "gate_up_proj" if len(self.parts) > 1 else "up_proj"
        return tuple(
            TensorSlice(
                f"{self.name}.experts.{name}",
                shape,
                (
                    slice(None),
                    slice(place * size + self.inner.start, place * size + self.inner.stop),
                    slice(None),
                ),
                self.gate_up.rows[:, place * width : (place + 1) * width],
                keeper=self.gate_up.stack,
            )
            for place in range(len(self.parts))
        )

    def _down_per_expert(self) -> tuple[TensorSlice, ...]:
        columns = slice(self.inner.start, self.inner.stop)
        return tuple(
            TensorSlice(
                f"{self.name}.experts.{expert}.down_proj.weight",
                (self.hidden_size, self.intermediate_size),
                (slice(None), columns),
                self.down.rows[expert],
                keeper=self.down.experts[expert],
            )
            for expert in range(self.expert_count)
        )

    def _down_stacked(self) -> tuple[TensorSlice, ...]:
        shape = (self.expert_count, self.hidden_size, self.intermediate_size)
        columns = slice(self.inner.start, self.inner.stop)
        take = (slice(None), slice(None), columns)
        name, rows = f"{self.name}.experts.down_proj", self.down.rows
        return (TensorSlice(name, shape, take, rows, keeper=self.down.stack),)
