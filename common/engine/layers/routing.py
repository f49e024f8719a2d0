"""Which experts a token goes to, and by which shares, spelled out in torch.

What the kernels of `fused_experts.py` are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.config.mla import RouterConfig
from common.engine.layers.fused_experts import GroupedRouter, SoftmaxRouter

# Added to a sum of shares before dividing, as the published code does.
SUM_EPSILON = 1e-20


def route_softmax(router: SoftmaxRouter, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(shares [T, k] in the dtype of the logits [T, experts], expert ids int64[T, k])."""
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    shares, experts = scores.topk(router.per_token, dim=-1)
    if router.is_normalized:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(logits.dtype), experts


def route_grouped(
    router: GroupedRouter, logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(shares fp32[T, k], expert ids int64[T, k]) of logits fp32[T, experts].

    bias: fp32[experts], takes part in the choice.
    """
    scores = logits.sigmoid() if router.rule.is_sigmoid else logits.softmax(dim=-1)
    experts = choose_experts(scores, bias, router.rule, router.per_token)
    shares = scores.gather(1, experts)
    if router.is_normalized:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + SUM_EPSILON)
    return shares * router.rule.scaling, experts


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
