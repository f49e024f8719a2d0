"""Rotary position embedding over half-split pairs (i, i + d/2) or interleaved ones (2i, 2i + 1),
for every kind of scaling.

A frequency that is off in its last fp32 bit turns position 100,000 by a thousandth, so operations
are in the order in which the models were trained, and checked bit for bit against transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from common.engine.config.rope import RopeConfig, RopeKind


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of T tokens, ready to be applied: both [T, 1, head dim] in the model's dtype.

    sin: negated for the first of each pair, so that a rotation is x * cos + swap_pairs(x) * sin.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate heads[T, heads, head dim]; the first channels of a head that has more than the
        rotation, the others pass."""
        rotated_dim = self.cos.shape[-1]
        if heads.shape[-1] > rotated_dim:
            passed = heads[..., rotated_dim:]
            return torch.cat((self.apply(heads[..., :rotated_dim]), passed), dim=-1)
        if self.is_interleaved:
            swapped = heads.reshape(*heads.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * self.cos, swapped, self.sin)

    def inverse(self) -> Rotation:
        """The rotation that undoes this one."""
        return Rotation(self.cos, -self.sin, self.is_interleaved)


class RotaryEmbedding:
    """Angles of positions; computed per forward pass, shared by all layers."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        frequencies, self.scale = rotary_frequencies(rope, head_dim)
        self.frequencies = frequencies.to(device)
        self.dtype = dtype
        self.is_interleaved = rope.is_interleaved

    def rotate(self, positions: Tensor) -> Rotation:
        """positions: int64[T]. Angles are computed in fp32 and cast last."""
        angles = positions[:, None].float() * self.frequencies
        cos = angles.cos() * self.scale
        sin = angles.sin() * self.scale
        if self.is_interleaved:
            cos, sin = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)
        else:
            cos, sin = torch.stack((cos, cos), -2), torch.stack((-sin, sin), -2)
        return Rotation(
            cos=cos.flatten(1).to(self.dtype)[:, None],
            sin=sin.flatten(1).to(self.dtype)[:, None],
            is_interleaved=self.is_interleaved,
        )


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """(fp32[head_dim / 2] radians per position, factor on cos and sin)."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    plain = 1.0 / periods
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain, 1.0
        case RopeKind.LINEAR:
            return plain / rope.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3_frequencies(rope, plain), 1.0
        case RopeKind.YARN:
            return _yarn_frequencies(rope, head_dim, periods), _yarn_scale(rope)
        case RopeKind.PROPORTIONAL:
            turned = int(rope.turned_share * head_dim // 2)
            plain[turned:] = 0.0
            return plain / rope.factor, 1.0
        case _:
            assert_never(rope.kind)


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, with a smooth band between."""
    wavelengths = 2 * math.pi / plain
    band = rope.high_freq_factor - rope.low_freq_factor
    kept = (rope.original_length / wavelengths - rope.low_freq_factor) / band
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * plain / rope.factor + kept * plain


def _yarn_frequencies(rope: RopeConfig, head_dim: int, periods: Tensor) -> Tensor:
    """Dimensions that turn often over the original length are kept, slow ones interpolated."""
    low = _yarn_dimension(rope, head_dim, rope.beta_fast)
    high = _yarn_dimension(rope, head_dim, rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A band of no width would divide by zero; any small width gives the same step.
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    kept = 1.0 - ramp
    return 1.0 / (rope.factor * periods) * (1.0 - kept) + 1.0 / periods * kept


def _yarn_dimension(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """The dimension that makes `rotations` turns over the original length."""
    turns = math.log(rope.original_length / (rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_magnitude(rope.factor, 1.0)


def score_scale(rope: RopeConfig, dim: int) -> float:
    """Factor on scores: of a head's dimension, and what a longer context asks for on top."""
    scale = 1.0 / math.sqrt(dim)
    if rope.mscale_all_dim:
        scale *= yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def yarn_magnitude(factor: float, weight: float) -> float:
    """By how much attention is sharpened when a context is made `factor` times longer."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
