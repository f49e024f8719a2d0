"""Which kernels compute the delta rule on a rank, and the proof at start that they are right."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from common.engine.kernel_trial import give_memory_back, largest_difference, try_kernels
from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.delta_rule import (
    DeltaGates,
    DeltaInputs,
    DeltaKernels,
    TorchDelta,
    apply_delta_rule,
)
from common.engine.layers.sequence_rows import SequenceRows

log = logging.getLogger(__name__)

# Relative to outputs and states of at least one. The kernels multiply in the dtype of the inputs,
# or in TF32, and sum in fp32; a wrong head, decay or order of the state is off by the order of one.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Tokens of each sequence: decodes beside chunks, at, before and behind the end of a chunk.
_CHECK_LENGTHS = ((1, 64, 63, 1, 130, 2), (1, 1, 1))


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of one rank. is_per_channel: every key channel has a decay of its own."""

    key_head_count: int
    head_count: int
    key_dim: int
    value_dim: int
    is_per_channel: bool
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class DeltaChoice:
    """The kernels, and why it is these; for the log and /server_info."""

    kernels: DeltaKernels
    reason: str


@cache
def choose_delta_kernels(shape: DeltaShape) -> DeltaChoice:
    """flash-linear-attention on CUDA if it is there and agrees with plain torch, that otherwise.

    Asked by every layer; the same answer for the same shape as long as the process lives.
    """
    plain: DeltaKernels = TorchDelta()
    if shape.device.type != "cuda":
        return DeltaChoice(plain, f"the path of {shape.device.type}")

    def build_and_check() -> tuple[DeltaKernels, float]:
        candidate = FlaDelta(is_per_channel=shape.is_per_channel)
        return candidate, check_delta_kernels(candidate, shape)

    kernels, reason = try_kernels("fla", build_and_check, TOLERANCE[shape.dtype], plain)
    give_memory_back(shape.device)
    if kernels is plain:
        log.warning("delta rule: %s; plain torch is used, which is slower", reason)
    return DeltaChoice(kernels, reason)


@torch.inference_mode()
def check_delta_kernels(candidate: DeltaKernels, shape: DeltaShape) -> float:
    """The largest difference to plain torch in outputs and states, over batches of random content.

    NaN if anything is not finite.
    """
    worst = 0.0
    for lengths in _CHECK_LENGTHS:
        rows = SequenceRows(lengths, shape.device)
        inputs, states = random_inputs(shape, sum(lengths), len(lengths))
        both: tuple[DeltaKernels, ...] = (TorchDelta(), candidate)
        results = [[*apply_delta_rule(kernels, inputs, rows, states)] for kernels in both]
        if rows.is_single and not shape.is_per_channel:
            gates = random_gates(shape, sum(lengths))
            heads = (inputs.query, inputs.key, inputs.value)
            for found, kernels in zip(results, both, strict=True):
                found += kernels.step_gated(*heads, gates, states)
        for wanted, actual in zip(*results, strict=True):
            difference = largest_difference(wanted, actual)
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
    return worst


def random_gates(shape: DeltaShape, token_count: int) -> DeltaGates:
    """The same every time."""
    generator = torch.Generator().manual_seed(token_count)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(shape.device)

    return DeltaGates(
        step=draw(token_count, shape.head_count).to(shape.dtype),
        beta=draw(token_count, shape.head_count).to(shape.dtype),
        decay_log=draw(shape.head_count),
        step_bias=draw(shape.head_count),
    )


def random_inputs(
    shape: DeltaShape, token_count: int, sequence_count: int
) -> tuple[DeltaInputs, Tensor]:
    """Inputs and states before them, the same every time."""
    generator = torch.Generator().manual_seed(token_count)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(shape.device)

    decay_dim = shape.key_dim if shape.is_per_channel else 1
    inputs = DeltaInputs(
        query=draw(token_count, shape.key_head_count, shape.key_dim).to(shape.dtype),
        key=draw(token_count, shape.key_head_count, shape.key_dim).to(shape.dtype),
        value=draw(token_count, shape.head_count, shape.value_dim).to(shape.dtype),
        log_decay=-0.1 * draw(token_count, shape.head_count, decay_dim).abs(),
        beta=draw(token_count, shape.head_count).sigmoid().to(shape.dtype),
    )
    states = draw(sequence_count, shape.head_count, shape.key_dim, shape.value_dim)
    return inputs, states
