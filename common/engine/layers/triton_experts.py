"""The small functions around the products of routed experts, in one launch each.

FlashInfer has them inside of kernels that make the products as well, and a router on its own for
one rule only (`fused_experts.py`). Importing this needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHOICE_BLOCK = 256
"""Choices of a batch that are compared at once."""
EXPERT_BLOCK = 32
"""Experts whose ends one program finds."""
COLUMN_BLOCK = 1024
SUM_EPSILON = tl.constexpr(1e-20)
"""Added to a sum of shares before dividing, as `routing.py` does."""


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits,
    bias,
    shares,
    experts,
    expert_count,
    scaling,
    count: tl.constexpr,
    is_sigmoid: tl.constexpr,
    is_normalized: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, block)
    is_there = ids < expert_count
    x = tl.load(logits + token * expert_count + ids, mask=is_there, other=float("-inf"))
    x = x.to(tl.float32)
    if is_sigmoid:
        scores = tl.div_rn(tl.full((block,), 1.0, tl.float32), 1.0 + tl.exp(-x))
        wanted = scores + tl.load(bias + ids, mask=is_there, other=0.0)
    else:
        powers = tl.where(is_there, tl.exp(x - tl.max(x, axis=0)), 0.0)
        scores = tl.div_rn(powers, tl.zeros((block,), tl.float32) + tl.sum(powers, axis=0))
        wanted = scores
    left = tl.where(is_there, wanted, float("-inf"))
    places = tl.arange(0, width)
    chosen = tl.zeros((width,), tl.float32)
    chosen_ids = tl.zeros((width,), tl.int32)
    for place in range(count):
        best = tl.argmax(left, axis=0)
        score = tl.sum(tl.where(ids == best, scores, 0.0), axis=0)
        chosen = tl.where(places == place, score, chosen)
        chosen_ids = tl.where(places == place, best, chosen_ids)
        left = tl.where(ids == best, float("-inf"), left)
    if is_normalized:
        total = tl.zeros((width,), tl.float32) + (tl.sum(chosen, axis=0) + SUM_EPSILON)
        chosen = tl.div_rn(chosen, total)
    chosen *= scaling
    target = token * count + places
    tl.store(shares + target, chosen.to(shares.dtype.element_ty), mask=places < count)
    tl.store(experts + target, chosen_ids, mask=places < count)


@triton.jit  # type: ignore[untyped-decorator]
def _arrange(  # type: ignore[no-untyped-def]
    hidden,
    experts,
    given,
    places,
    ordered,
    ends,
    token_stride,
    choice_count,
    expert_count,
    size,
    per_token: tl.constexpr,
    choice_block: tl.constexpr,
    expert_block: tl.constexpr,
    column_block: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, choice_block)
    if program < choice_count:
        # A choice's place is the number of those before it: of experts before its own, and of its
        # own by tokens before.
        own = tl.load(experts + program).to(tl.int32)
        before = tl.zeros((choice_block,), tl.int32)
        for start in range(0, choice_count, choice_block):
            others = start + lanes
            is_there = others < choice_count
            theirs = tl.load(experts + others, mask=is_there, other=0).to(tl.int32)
            is_before = (theirs < own) | ((theirs == own) & (others < program))
            before += (is_there & is_before).to(tl.int32)
        place = tl.sum(before, axis=0)
        tl.store(places + program, place)
        tl.store(ordered + place, own.to(tl.int64))
        source = hidden + (program // per_token).to(tl.int64) * token_stride
        target = given + place.to(tl.int64) * size
        for start in range(0, size, column_block):
            columns = start + tl.arange(0, column_block)
            row = tl.load(source + columns, mask=columns < size)
            tl.store(target + columns, row, mask=columns < size)
    else:
        ids = (program - choice_count) * expert_block + tl.arange(0, expert_block)
        counts = tl.zeros((expert_block,), tl.int32)
        for start in range(0, choice_count, choice_block):
            others = start + lanes
            is_there = others < choice_count
            theirs = tl.load(experts + others, mask=is_there, other=0).to(tl.int32)
            is_counted = is_there[None, :] & (theirs[None, :] <= ids[:, None])
            counts += tl.sum(is_counted.to(tl.int32), axis=1)
        tl.store(ends + ids, counts, mask=ids < expert_count)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    outputs,
    shares,
    places,
    beside,
    beside_gate,
    out,
    size,
    per_token: tl.constexpr,
    has_beside: tl.constexpr,
    has_gate: tl.constexpr,
    column_block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * column_block + tl.arange(0, column_block)
    is_there = columns < size
    total = tl.zeros((column_block,), tl.float32)
    for choice in range(per_token):
        place = tl.load(places + token * per_token + choice).to(tl.int64)
        share = tl.load(shares + token * per_token + choice).to(tl.float32)
        row = tl.load(outputs + place * size + columns, mask=is_there, other=0.0)
        total += row.to(tl.float32) * share
    if has_beside:
        added = tl.load(beside + token * size + columns, mask=is_there, other=0.0).to(tl.float32)
        if has_gate:
            gate = tl.load(beside_gate + token).to(tl.float32)
            added *= tl.div_rn(1.0, 1.0 + tl.exp(-gate))
        total += added
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=is_there)


def route(
    logits: Tensor,
    count: int,
    *,
    is_normalized: bool,
    bias: Tensor | None = None,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(shares [T, count] in the dtype of the logits, experts int32[T, count]) of the largest scores
    of [T, experts], the first of equal ones.

    Scores are a softmax, or with a bias fp32[experts] sigmoids; it takes part in the choice only.
    """
    token_count, expert_count = logits.shape
    assert logits.is_contiguous() and (bias is None or bias.is_contiguous())
    shares = logits.new_empty(token_count, count)
    experts = torch.empty(token_count, count, dtype=torch.int32, device=logits.device)
    _route[(token_count,)](
        logits,
        logits if bias is None else bias,
        shares,
        experts,
        expert_count,
        scaling,
        count=count,
        is_sigmoid=bias is not None,
        is_normalized=is_normalized,
        block=triton.next_power_of_2(expert_count),
        width=triton.next_power_of_2(count),
        num_warps=4,
    )
    return shares, experts


def arrange(
    hidden: Tensor, experts: Tensor, expert_count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of tokens [T, size] in the order of their experts [T, k]: (rows [T * k, size], their
    experts int64[T * k], ends int32[experts], where each choice went int32[T * k]).

    Each choice is compared with all others, so it is for the few rows of a decode.
    """
    token_count, per_token = experts.shape
    choice_count, size = token_count * per_token, hidden.shape[1]
    assert hidden.stride(1) == 1 and experts.is_contiguous()
    given = hidden.new_empty(choice_count, size)
    ordered = torch.empty(choice_count, dtype=torch.int64, device=hidden.device)
    ends, places = (
        torch.empty(count, dtype=torch.int32, device=hidden.device)
        for count in (expert_count, choice_count)
    )
    _arrange[(choice_count + triton.cdiv(expert_count, EXPERT_BLOCK),)](
        hidden,
        experts,
        given,
        places,
        ordered,
        ends,
        hidden.stride(0),
        choice_count,
        expert_count,
        size,
        per_token=per_token,
        choice_block=CHOICE_BLOCK,
        expert_block=EXPERT_BLOCK,
        column_block=COLUMN_BLOCK,
        num_warps=4,
    )
    return given, ordered, ends, places


def combine(
    outputs: Tensor,
    shares: Tensor,
    places: Tensor,
    beside: Tensor | None = None,
    beside_gate: Tensor | None = None,
) -> Tensor:
    """[T, size] in the dtype of the outputs [T * k, size]: those of each token's choices by their
    shares [T, k], and what stands beside them [T, size], times the sigmoid of its gate [T, 1]."""
    token_count, per_token = shares.shape
    size = outputs.shape[1]
    assert outputs.is_contiguous() and shares.is_contiguous()
    assert beside is None or beside.is_contiguous()
    out = outputs.new_empty(token_count, size)
    _combine[(token_count, triton.cdiv(size, COLUMN_BLOCK))](
        outputs,
        shares,
        places,
        outputs if beside is None else beside,
        outputs if beside_gate is None else beside_gate,
        out,
        size,
        per_token=per_token,
        has_beside=beside is not None,
        has_gate=beside_gate is not None,
        column_block=COLUMN_BLOCK,
        num_warps=4,
    )
    return out
