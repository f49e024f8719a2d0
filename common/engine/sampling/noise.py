"""Gumbel noise from a counter: a pure function of (seed, position, vocabulary index).

No generator state exists, so the noise of one request does not depend on the batch it is in, on
the order of its chunks or on the server that draws it. The hash is integer arithmetic and equal on
every device; the logarithms behind it may differ in the last bit between devices. Knows nothing of
logits.

Two rounds: the 64 bits of (seed, position) are mixed once per row (the splitmix64 finaliser), then
each vocabulary index is mixed with both halves of that key in 32 bits (the murmur3 finaliser, the
second half of the key entering between its multiplications, so that two rows are never shifted
copies of each other).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MIX_64_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_64_B = 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32
_MIX_32_A = 0x85EBCA6B - 2**32
_MIX_32_B = 0xC2B2AE35 - 2**32

# The largest float32 below 1: the logarithm of 1 - v must stay finite.
_BELOW_ONE = 1.0 - 2.0**-24


def wrap_seed(seed: int) -> int:
    """Any Python integer as the signed 64-bit number with the same low bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32[R, 2]: the mixed key of each row, from int64[R] seeds and int64[R] positions."""
    mixed = _mix_64(_mix_64(seeds) + positions * _GOLDEN_64)
    low = (mixed << 32) >> 32
    halves = torch.stack((low, mixed >> 32), dim=1)
    return halves.to(torch.int32)


def hash_bits(keys: Tensor, vocab_ids: Tensor) -> Tensor:
    """int32[R, K] of 32 mixed bits, from int32[R, 2] keys and int32[K] or int32[R, K] ids."""
    # Products wrap modulo 2**32. A right shift copies the sign, hence the masks.
    bits = vocab_ids * _GOLDEN_32 + keys[:, :1]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MIX_32_A
    bits ^= keys[:, 1:]
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= _MIX_32_B
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def gumbel(keys: Tensor, vocab_ids: Tensor) -> Tensor:
    """float32[R, K] of standard Gumbel noise, finite, for int32 keys [R, 2] and ids [K] or [R, K].

    Resolution is finest in the upper tail, which decides an argmax: v below is small there, and
    float32 holds small numbers exactly.
    """
    bits = hash_bits(keys, vocab_ids) & 0x7FFFFFFF
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def _mix_64(bits: Tensor) -> Tensor:
    bits = bits + _GOLDEN_64
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_64_A
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_64_B
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64; torch's own copies the sign bit."""
    low_bits: int = (1 << (64 - count)) - 1
    return (bits >> count) & low_bits
