"""Kernels around the products of routed experts: the choice of experts, their order, the way back.

Spelled out in torch they take some thirty launches. Which rules of routing and which numbers of
experts the kernels are known to be right for is found at start (`expert_trial.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.config.mla import RouterConfig

CHOICES_MAX = 4096
"""Of a batch, up to which each is compared with all others to find its place."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The experts of the largest softmax; their shares are it, or sum to one."""

    expert_count: int
    per_token: int
    is_normalized: bool


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """Groups first, then experts in them, by scores in fp32."""

    expert_count: int
    per_token: int
    is_normalized: bool
    rule: RouterConfig


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Of experts, and of those of a token."""

    experts: int
    per_token: int


Router = SoftmaxRouter | GroupedRouter


class ExpertKernels:
    """On CUDA. routers, counts: those for which the kernels are known to be right."""

    def __init__(self) -> None:
        self.routers: set[Router] = set()
        self.counts: set[ExpertCounts] = set()

    def route_softmax(self, router: SoftmaxRouter, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(shares [T, k] in the dtype of the logits [T, experts], expert ids int32[T, k])."""
        from common.engine.layers import triton_experts

        return triton_experts.route(logits, router.per_token, is_normalized=router.is_normalized)

    def route_grouped(
        self, router: GroupedRouter, logits: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(shares fp32[T, k], expert ids int32[T, k]) of logits fp32[T, experts] and a bias
        fp32[experts]: of sigmoids, and of shares that sum to the rule's scaling.

        By FlashInfer where there are groups."""
        if router.rule.group_count == 1:
            from common.engine.layers import triton_experts

            return triton_experts.route(
                logits,
                router.per_token,
                is_normalized=True,
                bias=bias,
                scaling=router.rule.scaling,
            )
        from flashinfer.fused_moe import fused_topk_deepseek

        shape = (len(logits), router.per_token)
        shares = logits.new_empty(shape)
        experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
        fused_topk_deepseek(
            logits,
            bias,
            router.rule.group_count,
            router.rule.groups_per_token,
            router.per_token,
            router.rule.scaling,
            shares,
            experts,
        )
        return shares, experts

    def takes(self, experts: Tensor, expert_count: int) -> bool:
        """Whether `arrange` and `combine` are for such choices [T, k]."""
        counts = ExpertCounts(expert_count, experts.shape[1])
        return counts in self.counts and 0 < experts.numel() <= CHOICES_MAX

    def arrange(
        self, hidden: Tensor, experts: Tensor, expert_count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows of tokens [T, size] in the order of their experts [T, k], those experts int64,
        ends int32[experts], where each choice went)."""
        from common.engine.layers import triton_experts

        return triton_experts.arrange(hidden, experts, expert_count)

    def combine(
        self,
        outputs: Tensor,
        shares: Tensor,
        places: Tensor,
        beside: Tensor | None = None,
        beside_gate: Tensor | None = None,
    ) -> Tensor:
        """[T, size]: outputs [T * k, size] of arranged rows summed by shares [T, k], and `beside`
        [T, size], times the sigmoid of its gate [T, 1] if it has one."""
        from common.engine.layers import triton_experts

        return triton_experts.combine(outputs, shares, places, beside, beside_gate)
