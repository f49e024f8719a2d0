"""Experts whose router chooses groups first, and an MLP beside them that every token takes.

Scores, choice and shares are computed in fp32 with fp32 weights, whatever the model's dtype: a
rounded score sends a token to another expert, which is no rounding any more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import MoeConfig
from common.engine.layers.expert_order import Beside
from common.engine.layers.fused_experts import GroupedRouter
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import Activation, GatedMlp, gated_silu
from common.engine.layers.moe import MoeMlp
from common.engine.layers.routing import route_grouped


class GroupedMoeMlp(MoeMlp):
    """hidden [T, hidden] to the same shape; stands where a plain MLP would.

    expert_io_size: what experts are given and return, if it is not the hidden size.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        hidden_size: int,
        moe: MoeConfig,
        expert_io_size: int | None = None,
        activation: Activation = gated_silu,
        is_gated: bool = True,
    ) -> None:
        assert moe.router is not None
        super().__init__(
            context,
            name,
            hidden_size=expert_io_size or hidden_size,
            moe=moe,
            activation=activation,
            is_gated=is_gated,
        )
        self.grouped = GroupedRouter(
            moe.expert_count, moe.experts_per_token, moe.is_normalized, moe.router
        )
        self.router = context.empty_fp32(moe.expert_count, hidden_size)
        self.bias: Tensor | None = None
        if moe.router.is_sigmoid:
            self.bias = context.empty_fp32(moe.expert_count)
        self.shared: GatedMlp | None = None
        if moe.shared_size:
            self.shared = GatedMlp(
                context,
                f"{name}.shared_experts",
                hidden_size=hidden_size,
                intermediate_size=moe.shared_size,
            )

    def beside(self, hidden: Tensor) -> Beside | None:
        return None if self.shared is None else Beside(self.shared(hidden))

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(shares fp32[T, k], expert ids [T, k]) of every token."""
        logits = F.linear(hidden.float(), self.router)
        kernels = self.kernels
        if kernels is not None and self.grouped in kernels.routers and len(hidden):
            assert self.bias is not None
            return kernels.route_grouped(self.grouped, logits, self.bias)
        return route_grouped(self.grouped, logits, self.bias)

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        if self.bias is not None:
            yield Weight.whole(f"{self.name}.gate.e_score_correction_bias", self.bias)
        if self.shared is not None:
            yield from self.shared.weights()
