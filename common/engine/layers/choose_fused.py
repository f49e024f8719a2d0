"""Whether a rank's small functions are fused, and the proof at start that they compute the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from common.engine.config.rope import RopeConfig
from common.engine.distributed import ParallelContext
from common.engine.kernel_trial import give_memory_back, largest_difference, try_or_torch
from common.engine.layers.expert_trial import check_order, check_router
from common.engine.layers.fused import FusedKernels, NormedRotation, RotationShape
from common.engine.layers.fused_cpu import CpuKernels
from common.engine.layers.fused_experts import ExpertCounts, Router
from common.engine.layers.fused_kinds import AnyKernels
from common.engine.layers.fused_rotation import FusedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import fastest, gated_gelu, gated_silu
from common.engine.layers.norm import OffsetNorm, OffsetQkNorm, QkNorm, RmsNorm, normalize
from common.engine.layers.rotary import RotaryEmbedding

log = logging.getLogger(__name__)

# The plain spelling rounds what is normalised before it is scaled, and a sum before it is
# normalised; the kernels round once. So the results are two roundings apart.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAKERS: dict[str, type[AnyKernels]] = {"cuda": FusedKernels, "cpu": CpuKernels}
"""By type of device."""
_ROW_COUNTS = (0, 1, 2, 17, 300)
_EPSILON = 1e-5
POSITION_STEP = 331
"""Between the tokens of a trial, so that they are in front and far behind."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Shape of a rank's rows. size: of a hidden state; inner_size: of a gate; rope: how heads are
    turned; rotations: which heads, if kernels know such; has_qk_norm: whether they are normed.
    expert_counts, router: of experts, None if there are none, or none that kernels know."""

    size: int
    inner_size: int
    dtype: torch.dtype
    device: torch.device
    rope: RopeConfig | None = None
    rotations: tuple[RotationShape, ...] = ()
    has_qk_norm: bool = False
    expert_counts: ExpertCounts | None = None
    router: Router | None = None


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """The kernels, None for the plain spelling, and why; for the log and /server_info."""

    kernels: AnyKernels | None
    reason: str


@cache
def choose_fused(shape: FusedShape) -> FusedChoice:
    """FlashInfer's on CUDA and our own on a CPU, if they are there and agree with the plain
    spelling.

    The same answer for the same shape as long as the process lives.
    """
    make = MAKERS.get(shape.device.type)
    if make is None:
        return FusedChoice(None, f"the path of {shape.device.type}")
    if shape.dtype not in make.dtypes:
        return FusedChoice(None, f"{make.name} has no kernels for {shape.dtype}")

    def build_and_check() -> tuple[AnyKernels, float]:
        kernels = make()
        return kernels, check_fused(kernels, shape)

    kernels, reason = try_or_torch(make.name, build_and_check, TOLERANCE[shape.dtype])
    give_memory_back(shape.device)
    if kernels is None:
        log.warning("norms and activations: %s; they take several kernels each", reason)
        return FusedChoice(None, reason)
    reason = "; ".join((reason, *_try_parts(kernels, shape)))
    give_memory_back(shape.device)
    return FusedChoice(kernels, reason)


def _try_parts(kernels: AnyKernels, shape: FusedShape) -> Iterator[str]:
    """Let the kernels do what they are right about; of each part, why or why not."""
    yield _try_part(
        shape,
        kernels.name,
        "norms by offsets",
        partial(check_offset_norms, kernels, shape),
        kernels.forget_offset_norms,
    )
    for rotation in shape.rotations:
        yield _try_part(
            shape,
            kernels.name,
            f"rotation of {rotation.rotated_dim} of {rotation.head_dim} channels",
            partial(check_rotation, kernels, rotation, shape),
            partial(kernels.rotations.discard, rotation),
        )
        for is_offset in (False, True) if shape.has_qk_norm else ():
            normed = NormedRotation(rotation, is_offset)
            yield _try_part(
                shape,
                kernels.name_of_turning,
                f"norm and rotation of heads{' by offsets' if is_offset else ''}",
                partial(check_normed_rotation, kernels, normed, shape),
                partial(kernels.normed_rotations.discard, normed),
            )
    dtype, device, experts = shape.dtype, shape.device, kernels.experts
    if experts is None:
        return
    if shape.router is not None:
        yield _try_part(
            shape,
            "flashinfer and triton",
            "routing to experts",
            partial(check_router, experts, shape.router, dtype, device),
            partial(experts.routers.discard, shape.router),
        )
    if shape.expert_counts is not None:
        yield _try_part(
            shape,
            "triton",
            "order of experts",
            partial(check_order, experts, shape.expert_counts, dtype, device),
            partial(experts.counts.discard, shape.expert_counts),
        )


def _try_part(
    shape: FusedShape,
    library: str,
    name: str,
    check: Callable[[], float],
    forget: Callable[[], None],
) -> str:
    """check: as it says, the kernels take that part from its beginning on. forget: no more."""
    right, reason = try_or_torch(library, lambda: (True, check()), TOLERANCE[shape.dtype])
    if right is None:
        forget()
        log.warning("%s: %s; it takes several kernels", name, reason)
    return f"{name}: {reason}"


@torch.inference_mode()
def check_normed_rotation(kernels: AnyKernels, normed: NormedRotation, shape: FusedShape) -> float:
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
def check_rotation(kernels: AnyKernels, rotation: RotationShape, shape: FusedShape) -> float:
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
        rotated = FusedRotation(narrow, positions, kernels)
        found = torch.cat(rotated.apply_both(heads[:, :4], heads[:, 4:6]), dim=1)
        expected = torch.cat((wide.rotate(positions).apply(heads[:, :6].float()), heads[:, 6:]), 1)
        rotated.apply_in_place(heads[:, :4], heads[:, 4:6])
        difference = largest_difference(
            torch.cat((expected[:, :6], expected), dim=1), torch.cat((found, heads), dim=1)
        )
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


def check_fused(kernels: AnyKernels, shape: FusedShape) -> float:
    """The largest difference to the plain spelling; NaN if anything is not finite."""
    return _compare(kernels, shape, (_norms, _activations))


def check_offset_norms(kernels: AnyKernels, shape: FusedShape) -> float:
    """As `check_fused`, of norms by offsets. From here on the kernels take them."""
    kernels.has_offset_norms = True
    return _compare(kernels, shape, (partial(_norms, kind=OffsetNorm),))


Compute = Callable[[LayerContext, FusedShape, int, torch.Generator], list[Tensor]]


@torch.inference_mode()
def _compare(kernels: AnyKernels, shape: FusedShape, parts: Sequence[Compute]) -> float:
    plain = LayerContext(ParallelContext(), shape.device, shape.dtype)
    contexts = (plain, replace(plain, fused=kernels))
    worst = 0.0
    for row_count in _ROW_COUNTS:
        for compute in parts:
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
    context: LayerContext,
    shape: FusedShape,
    row_count: int,
    generator: torch.Generator,
    kind: type[RmsNorm] = RmsNorm,
) -> list[Tensor]:
    """Also of the first part of wider rows, which lie apart, and of sums."""
    draw = _drawing(shape, generator)
    found: list[Tensor] = []
    norm = kind(context, "norm", shape.size, _EPSILON)
    norm.weight.copy_(draw(shape.size))
    found.append(norm(draw(row_count, shape.size)))
    found.append(norm(draw(row_count, shape.size + 64)[:, : shape.size]))
    rows = draw(row_count, shape.size + 128)
    norm.in_place(rows[:, 64 : 64 + shape.size])
    found.append(rows)
    found += norm.after_add(draw(row_count, shape.size), draw(row_count, shape.size))
    return found


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
