"""The comparison of kernels around routed experts with their plain spelling, at start."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.engine.kernel_trial import largest_difference
from common.engine.layers.expert_order import Beside, FusedOrder, PlainOrder
from common.engine.layers.fused_experts import ExpertCounts, ExpertKernels, Router, SoftmaxRouter
from common.engine.layers.routing import route_grouped, route_softmax

TOKEN_COUNTS = (1, 3, 130)
_SIZE = 192
"""Of a row, which two blocks of a kernel hold."""


@torch.inference_mode()
def check_router(
    kernels: ExpertKernels, router: Router, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest difference between a token's shares, the largest first; inf where it goes to
    experts that are worse than those it should go to. From here on the kernels route by it.

    Which one of two equal experts it goes to is left open: a matter of the order of comparisons.
    """
    kernels.routers.add(router)
    worst = 0.0
    for count in TOKEN_COUNTS:
        generator = torch.Generator().manual_seed(count)
        logits = torch.randn(count, router.expert_count, generator=generator).to(device)
        bias = torch.rand(router.expert_count, generator=generator).to(device)
        if isinstance(router, SoftmaxRouter):
            logits = logits.to(dtype)
            shares, experts = kernels.route_softmax(router, logits)
            expected, _ = route_softmax(router, logits)
            of_chosen = logits.gather(1, experts.long()).float()
            wanted = logits.topk(router.per_token, dim=-1).values.float()
        else:
            shares, experts = kernels.route_grouped(router, logits, bias)
            expected, chosen = route_grouped(router, logits, bias)
            scores = logits.sigmoid() + bias
            of_chosen, wanted = (scores.gather(1, e.long()) for e in (experts, chosen))
        if _has_repeats(experts):
            return math.inf
        pairs = ((wanted, of_chosen), (expected, shares))
        for plain, found in pairs:
            difference = largest_difference(_descending(plain), _descending(found))
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
    return worst


@torch.inference_mode()
def check_order(
    kernels: ExpertKernels, counts: ExpertCounts, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest difference of rows that went to their experts and came back, inf where they went
    another way. From here on the kernels order such choices."""
    kernels.counts.add(counts)
    worst = 0.0
    for count in TOKEN_COUNTS:
        generator = torch.Generator().manual_seed(count)

        def draw(*size: int, by: torch.Generator = generator) -> Tensor:
            return torch.randn(size, generator=by).to(dtype).to(device)

        hidden = draw(count, _SIZE + 8)[:, :_SIZE]
        scores = torch.rand(count, counts.experts, generator=generator).to(device)
        best, experts = scores.topk(counts.per_token, dim=-1)
        shares = best.softmax(dim=-1)
        plain = PlainOrder(hidden, experts, counts.experts, row_max=count, has_kernel=True)
        fused = FusedOrder(
            kernels, hidden, experts.int(), counts.experts, row_max=count, has_kernel=True
        )
        ways = (
            (plain.rows, fused.rows),
            (plain.groups.experts, fused.groups.experts),
            (plain.groups.ends, fused.groups.ends),
        )
        if not all(torch.equal(expected, found) for expected, found in ways):
            return math.inf
        outputs, beside, gate = draw(experts.numel(), _SIZE), draw(count, _SIZE), draw(count, 1)
        for of_shares in (shares, shares.to(dtype)):
            for added in (None, Beside(beside), Beside(beside, gate)):
                expected, found = (
                    order.combine(outputs, of_shares, added) for order in (plain, fused)
                )
                difference = largest_difference(expected, found)
                if not math.isfinite(difference):
                    return math.nan
                worst = max(worst, difference)
    return worst


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True).values


def _has_repeats(experts: Tensor) -> bool:
    ordered = experts.sort(dim=-1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())
