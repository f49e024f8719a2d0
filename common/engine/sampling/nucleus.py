"""The nucleus of many rows (top_p) without sorting and without waiting for the device.

Sorting a vocabulary is slow, and to sort the most likely tokens only, one has to ask whether they
were enough. Here every row's probabilities are added up by the float that its logits are, in two
passes: by its upper 16 bits, and inside of the value at which the sum gets there by the lower ones.
Sums are of integers, so a row's nucleus depends neither on the other rows nor on any order.

Knows nothing of requests or noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Logits that are computed together: bounds the extra memory to about 200 MiB at any batch."""

ONE = 1 << 40
"""Probability 1: a token's share of it is rounded by less than a float32 is."""

HALF_BITS = 16
HALF = 1 << HALF_BITS


def drop_tails(x: Tensor, top_p: Tensor) -> None:
    """Make every token impossible before which, from the most likely on, `top_p` is reached.

    Equal logits are kept or dropped together, where an order decides between them if they are
    sorted.

    Args:
        x: float32[R, vocab], contiguous, changed in place; at least one of each row is finite.
        top_p: float32[R, 1], above 0 and below 1.
    """
    block = max(1, BLOCK_ELEMENTS // x.shape[1])
    for first in range(0, len(x), block):
        rows = slice(first, first + block)
        x[rows].masked_fill_(_is_tail(x[rows], top_p[rows]), -torch.inf)


def _is_tail(x: Tensor, top_p: Tensor) -> Tensor:
    shares = (x.softmax(dim=-1) * ONE).to(torch.int64)
    target = (top_p * ONE).to(torch.int64).clamp_(min=1)
    # Order the bits of floats as integers, the largest first: negative ones count the other way.
    bits = x.view(torch.int32)
    places = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    upper = (places >> HALF_BITS).to(torch.int64) + HALF // 2
    lower = (places & (HALF - 1)).to(torch.int64)
    last_upper, before = _last_bin(upper, shares, target)
    is_last = upper == last_upper
    last_lower, _ = _last_bin(lower, shares * is_last, target - before)
    return (upper > last_upper) | (is_last & (lower > last_lower))


def _last_bin(bins: Tensor, shares: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """int64[R, 1] each: the bin with which the sum of the shares reaches the target, and the sum
    before it. bins: int64[R, vocab] in 0 .. HALF - 1."""
    sums = torch.zeros((len(bins), HALF), dtype=torch.int64, device=bins.device)
    ends = sums.scatter_add_(1, bins, shares).cumsum(1)
    # Rounded down, all of them together may stay below a top_p of nearly 1.
    last = (ends < target).sum(1, keepdim=True).clamp_(max=HALF - 1)
    before = ends.gather(1, (last - 1).clamp_(min=0)).masked_fill_(last == 0, 0)
    return last, before
