"""A norm and its gate in one kernel, by flash-linear-attention on CUDA, and the proof at start.

The library is imported when the kernel is made. Written against the sources of fla-core 0.6.0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernel_trial import give_memory_back, largest_difference, try_or_torch

log = logging.getLogger(__name__)

# The plain spelling rounds what is normalised, and that times its weight, before it is gated.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_EPSILON = 1e-6
_SHAPES = ((1, 4), (17, 3))

GatedNormKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""x / rms(x) * w * silu(gate), of x and gate [.., size], w [size] and the epsilon."""


@dataclass(frozen=True, slots=True)
class GatedNormShape:
    size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class GatedNormChoice:
    """The kernel, None for the plain spelling, and why."""

    kernel: GatedNormKernel | None
    reason: str


@cache
def choose_gated_norm(shape: GatedNormShape) -> GatedNormChoice:
    if shape.device.type != "cuda":
        return GatedNormChoice(None, f"the path of {shape.device.type}")

    def build_and_check() -> tuple[GatedNormKernel, float]:
        kernel = make_gated_norm()
        return kernel, check_gated_norm(kernel, shape)

    kernel, reason = try_or_torch("fla", build_and_check, TOLERANCE[shape.dtype])
    give_memory_back(shape.device)
    if kernel is None:
        log.warning("gated norms: %s; they take several kernels each", reason)
    return GatedNormChoice(kernel, reason)


def make_gated_norm() -> GatedNormKernel:
    """Raises ImportError if the library is not installed."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    def run(hidden: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed: Tensor = rms_norm_gated(hidden, gate, weight, None, activation="swish", eps=epsilon)
        return normed

    return run


@torch.inference_mode()
def check_gated_norm(kernel: GatedNormKernel, shape: GatedNormShape) -> float:
    """The largest difference to the same in fp32; NaN if anything is not finite."""
    worst = 0.0
    for tokens, heads in _SHAPES:
        generator = torch.Generator().manual_seed(tokens)
        drawn = (
            torch.randn(*size, shape.size, generator=generator).to(shape.dtype).to(shape.device)
            for size in ((tokens, heads), (tokens, heads), ())
        )
        hidden, gate, weight = drawn
        found = kernel(hidden, gate, weight, _EPSILON)
        if found.shape != hidden.shape or found.dtype != hidden.dtype:
            return math.inf
        wide = F.rms_norm(hidden.float(), (shape.size,), weight.float(), _EPSILON)
        difference = largest_difference(wide * F.silu(gate.float()), found)
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference)
    return worst
