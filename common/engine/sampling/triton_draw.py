"""One token for each row of logits in one launch, greedy rows and drawn ones alike.

The noise is that of `noise.py`, spelled for Triton: of (seed, position, vocabulary index) and of
nothing else, which no library's sampling offers. Importing this needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARP_COUNT = 8


@triton.jit
def _mixed_64(bits):  # type: ignore[no-untyped-def]
    bits = bits + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _gumbel(low, high, ids):  # type: ignore[no-untyped-def]
    bits = ids.to(tl.uint32) * 0x9E3779B1 + low
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= high
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    v = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    # log(1 - v) to the last bits where v is small, from a logarithm that is right around 1.
    rest = 1.0 - v
    is_one = rest == 1.0
    grown = tl.log(rest) * tl.div_rn(v, tl.where(is_one, 1.0, 1.0 - rest))
    return -tl.log(-tl.where(is_one, -v, grown))


@triton.jit  # type: ignore[untyped-decorator]
def _draw_rows(  # type: ignore[no-untyped-def]
    logits,
    seeds,
    positions,
    temperatures,
    out,
    row_count,
    vocab_size,
    is_any_drawn: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * vocab_size
    lanes = tl.arange(0, block)
    best = tl.full((block,), float("-inf"), tl.float32)
    place = tl.zeros((block,), tl.int32)
    is_broken = tl.zeros((block,), tl.int32)
    temperature = 0.0
    low = tl.zeros((), tl.uint32)
    high = tl.zeros((), tl.uint32)
    if is_any_drawn:
        temperature = tl.load(temperatures + row)
        seed = tl.load(seeds + row).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint64)
        key = _mixed_64(_mixed_64(seed) + position * 0x9E3779B97F4A7C15)
        low = (key & 0xFFFFFFFF).to(tl.uint32)
        high = (key >> 32).to(tl.uint32)
    for start in range(0, vocab_size, block):
        ids = start + lanes
        is_there = ids < vocab_size
        score = tl.load(first + ids, mask=is_there, other=float("-inf"))
        is_broken |= (is_there & ((score != score) | (tl.abs(score) == float("inf")))).to(tl.int32)
        if is_any_drawn:  # noqa: SIM102 - one is known when this is compiled
            if temperature > 0.0:
                score = tl.div_rn(score, temperature) + _gumbel(low, high, ids)
        is_better = score > best
        best = tl.where(is_better, score, best)
        place = tl.where(is_better, ids, place)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, place, vocab_size), axis=0)
    tl.store(out + row, token.to(tl.int64))
    tl.store(out + row_count + row, (tl.max(is_broken, axis=0) == 0).to(tl.int64))
    tl.store(out + 2 * row_count + row, (largest > float("-inf")).to(tl.int64))


def draw_rows(logits: Tensor, steering: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """int64[3, R] of float32[R, vocab] logits, not changed: the first of the largest, or the token
    drawn; whether all logits were finite; whether any was above minus infinity.

    steering: int64[R] seeds, int64[R] positions and float32[R] temperatures, 0 for a row that
    takes the largest; None if all do.
    """
    row_count, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty((3, row_count), dtype=torch.int64, device=logits.device)
    _draw_rows[(row_count,)](
        logits,
        *(steering or (logits, logits, logits)),
        out,
        row_count,
        vocab_size,
        is_any_drawn=steering is not None,
        block=BLOCK,
        num_warps=WARP_COUNT,
    )
    return out
