"""Experts whose router chooses groups first, and an MLP beside them that every token takes.

Scores, choice and shares are computed in fp32 with fp32 weights, whatever the model's dtype: a
rounded score sends a token to another expert, which is no rounding any more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.mla import RouterConfig
from common.engine.config.model import MoeConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import Activation, GatedMlp, gated_silu
from common.engine.layers.moe import MoeMlp

# Added to a sum of shares before dividing, as the published code does.
SUM_EPSILON = 1e-20


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
        self.router_config = moe.router
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

    def __call__(self, hidden: Tensor) -> Tensor:
        routed = super().__call__(hidden)
        return routed if self.shared is None else routed + self.shared(hidden)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(shares fp32[T, k], expert ids int64[T, k]) of every token."""
        logits = F.linear(hidden.float(), self.router)
        scores = logits.sigmoid() if self.router_config.is_sigmoid else logits.softmax(dim=-1)
        experts = choose_experts(scores, self.bias, self.router_config, self.experts_per_token)
        shares = scores.gather(1, experts)
        if self.is_normalized:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + SUM_EPSILON)
        return shares * self.router_config.scaling, experts

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        if self.bias is not None:
            yield Weight.whole(f"{self.name}.gate.e_score_correction_bias", self.bias)
        if self.shared is not None:
            yield from self.shared.weights()


def choose_experts(scores: Tensor, bias: Tensor | None, config: RouterConfig, count: int) -> Tensor:
    """int64[T, count] of the experts with the best scores fp32[T, experts] in the best groups.

    bias: fp32[experts], takes part in the choice; a group then counts its two best experts, and
    its single best one without a bias.
    """
    wanted = scores if bias is None else scores + bias
    if config.group_count > 1:
        groups = wanted.view(len(wanted), config.group_count, -1)
        group_scores = groups.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
        best = group_scores.topk(config.groups_per_token, dim=-1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        wanted = groups.masked_fill(is_out[:, :, None], float("-inf")).flatten(-2)
    return wanted.topk(count, dim=-1).indices
