"""Whether a rank's small functions are fused, and the proof at start that they compute the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from common.engine.config.rope import RopeConfig
from common.engine.distributed import ParallelContext
from common.engine.kernel_trial import give_memory_back, largest_difference, try_or_torch
from common.engine.layers.fused import FusedKernels, NormedRotation, RotationShape
from common.engine.layers.fused_rotation import FusedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import fastest, gated_gelu, gated_silu
from common.engine.layers.norm import OffsetQkNorm, QkNorm, RmsNorm, normalize
from common.engine.layers.rotary import RotaryEmbedding

log = logging.getLogger(__name__)

# The plain spelling rounds what is normalised before it is scaled, and a sum before it is
# normalised; the kernels round once. So the results are two roundings apart.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROW_COUNTS = (0, 1, 2, 17, 300)
_EPSILON = 1e-5
POSITION_STEP = 331
"""Between the tokens of a trial, so that they are in front and far behind."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Shape of a rank's rows. size: of a hidden state; inner_size: of a gate; rope: how heads are
    turned; rotations: which heads, if kernels know such; has_qk_norm: whether they are normed."""

    size: int
    inner_size: int
    dtype: torch.dtype
    device: torch.device
    rope: RopeConfig | None = None
    rotations: tuple[RotationShape, ...] = ()
    has_qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """The kernels, None for the plain spelling, and why; for the log and /server_info."""

    kernels: FusedKernels | None
    reason: str


@cache
def choose_fused(shape: FusedShape) -> FusedChoice:
    """FlashInfer's on CUDA if it is there and agrees with the plain spelling.

    The same answer for the same shape as long as the process lives.
    """
    if shape.device.type != "cuda":
        return FusedChoice(None, f"the path of {shape.device.type}")
    if shape.dtype not in TOLERANCE:
        return FusedChoice(None, f"flashinfer has no kernels for {shape.dtype}")

    def build_and_check() -> tuple[FusedKernels, float]:
        kernels = FusedKernels()
        return kernels, check_fused(kernels, shape)

    kernels, reason = try_or_torch("flashinfer", build_and_check, TOLERANCE[shape.dtype])
    give_memory_back(shape.device)
    if kernels is None:
        log.warning("norms and activations: %s; they take several kernels each", reason)
        return FusedChoice(None, reason)
    for rotation in shape.rotations:
        reason = f"{reason}; {_try_rotation(kernels, rotation, shape)}"
        for is_offset in (False, True) if shape.has_qk_norm else ():
            normed = NormedRotation(rotation, is_offset)
            reason = f"{reason}; {_try_normed_rotation(kernels, normed, shape)}"
    give_memory_back(shape.device)
    return FusedChoice(kernels, reason)


def _try_rotation(kernels: FusedKernels, rotation: RotationShape, shape: FusedShape) -> str:
    """Let the kernels turn such heads if they are right; why, or why not."""

    def build_and_check() -> tuple[FusedKernels, float]:
        return kernels, check_rotation(kernels, rotation, shape)

    right, reason = try_or_torch("flashinfer", build_and_check, TOLERANCE[shape.dtype])
    found = f"rotation of {rotation.rotated_dim} of {rotation.head_dim} channels: {reason}"
    if right is None:
        kernels.rotations.discard(rotation)
        log.warning("%s; it takes several kernels", found)
    return found


def _try_normed_rotation(kernels: FusedKernels, normed: NormedRotation, shape: FusedShape) -> str:
    """As `_try_rotation`, of the kernel that norms as well."""

    def build_and_check() -> tuple[FusedKernels, float]:
        return kernels, check_normed_rotation(kernels, normed, shape)

    right, reason = try_or_torch("triton", build_and_check, TOLERANCE[shape.dtype])
    found = f"norm and rotation of heads{' by offsets' if normed.is_offset else ''}: {reason}"
    if right is None:
        kernels.normed_rotations.discard(normed)
        log.warning("%s; they take a kernel more each", found)
    return found


@torch.inference_mode()
def check_normed_rotation(
    kernels: FusedKernels, normed: NormedRotation, shape: FusedShape
) -> float:
    """As `check_rotation`, of heads that are normed before, each by a weight of its own."""
    assert shape.rope is not None
    kernels.normed_rotations.add(normed)
    rotation, device, worst = normed.rotation, shape.device, 0.0
    wide, narrow = (
        RotaryEmbedding(shape.rope, rotation.rotated_dim, device=device, dtype=dtype)
        for dtype in (torch.float32, shape.dtype)
    )
    context = LayerContext(ParallelContext(), device, shape.dtype)
    spelling = OffsetQkNorm if normed.is_offset else QkNorm
    norm = spelling(
        context,
        "norm",
        head_count=4,
        kv_head_count=2,
        head_dim=rotation.head_dim,
        epsilon=_EPSILON,
    )
    for count in filter(None, _ROW_COUNTS):
        draw = _drawing(shape, torch.Generator().manual_seed(count))
        heads = draw(count, 8, rotation.head_dim)[:, :6]
        norm.weight.copy_(draw(6, rotation.head_dim))
        positions = torch.arange(count, device=device) * POSITION_STEP
        found = FusedRotation(narrow, positions, kernels).apply_normed(heads, norm)
        assert found is not None
        factors = norm.weight.float() + (1.0 if normed.is_offset else 0.0)
        expected = wide.rotate(positions).apply(normalize(heads.float(), _EPSILON) * factors)
        difference = largest_difference(expected, found)
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


@torch.inference_mode()
def check_rotation(kernels: FusedKernels, rotation: RotationShape, shape: FusedShape) -> float:
    """The largest difference to the plain spelling in fp32; NaN if anything is not finite.

    Heads lie among others, as a product makes them. From here on the kernels turn such heads.
    """
    assert shape.rope is not None
    kernels.rotations.add(rotation)
    worst = 0.0
    device = shape.device
    wide, narrow = (
        RotaryEmbedding(shape.rope, rotation.rotated_dim, device=device, dtype=dtype)
        for dtype in (torch.float32, shape.dtype)
    )
    for count in filter(None, _ROW_COUNTS):  # a layer always has rows
        draw = _drawing(shape, torch.Generator().manual_seed(count))
        heads = draw(count, 7, rotation.head_dim)
        positions = torch.arange(count, device=device) * POSITION_STEP
        found = FusedRotation(narrow, positions, kernels).apply_both(heads[:, :4], heads[:, 4:6])
        expected = wide.rotate(positions).apply(heads[:, :6].float())
        difference = largest_difference(expected, torch.cat(found, dim=1))
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


@torch.inference_mode()
def check_fused(kernels: FusedKernels, shape: FusedShape) -> float:
    """The largest difference to the plain spelling; NaN if anything is not finite."""
    plain = LayerContext(ParallelContext(), shape.device, shape.dtype)
    contexts = (plain, replace(plain, fused=kernels))
    worst = 0.0
    for row_count in _ROW_COUNTS:
        for compute in (_norms, _sums, _activations):
            generators = (torch.Generator().manual_seed(row_count) for _ in contexts)
            results = [
                compute(context, shape, row_count, generator)
                for context, generator in zip(contexts, generators, strict=True)
            ]
            for expected, actual in zip(*results, strict=True):
                if expected.shape != actual.shape:
                    return math.inf
                if not expected.numel():
                    continue
                difference = largest_difference(expected, actual)
                if not math.isfinite(difference):
                    return math.nan
                worst = max(worst, difference)
    return worst


def _norms(
    context: LayerContext, shape: FusedShape, row_count: int, generator: torch.Generator
) -> list[Tensor]:
    """Also of the first part of wider rows, which lie apart."""
    draw = _drawing(shape, generator)
    found: list[Tensor] = []
    norm = RmsNorm(context, "norm", shape.size, _EPSILON)
    norm.weight.copy_(draw(shape.size))
    found.append(norm(draw(row_count, shape.size)))
    found.append(norm(draw(row_count, shape.size + 64)[:, : shape.size]))
    return found


def _sums(
    context: LayerContext, shape: FusedShape, row_count: int, generator: torch.Generator
) -> list[Tensor]:
    draw = _drawing(shape, generator)
    norm = RmsNorm(context, "norm", shape.size, _EPSILON)
    norm.weight.copy_(draw(shape.size))
    return list(norm.after_add(draw(row_count, shape.size), draw(row_count, shape.size)))


def _activations(
    context: LayerContext, shape: FusedShape, row_count: int, generator: torch.Generator
) -> list[Tensor]:
    draw = _drawing(shape, generator)
    kinds = (gated_silu, gated_gelu) if row_count else ()
    return [
        fastest(kind, context, shape.inner_size)(draw(row_count, 2 * shape.inner_size))
        for kind in kinds
    ]


def _drawing(shape: FusedShape, generator: torch.Generator) -> Callable[..., Tensor]:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype).to(shape.device)

    return draw
