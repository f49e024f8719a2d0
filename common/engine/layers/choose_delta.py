"""Which kernels compute the delta rule on a rank, and the proof at start that they are right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.delta_rule import (
    DeltaInputs,
    DeltaKernels,
    TorchDelta,
    apply_delta_rule,
)
from common.engine.layers.sequence_rows import SequenceRows

# Relative to outputs and states of at least one. The kernels multiply in the dtype of the inputs,
# or in TF32, and sum in fp32; a wrong head, decay or order of the state is off by the order of one.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Tokens of each sequence: decodes beside chunks, at, before and behind the end of a chunk.
_CHECK_LENGTHS = ((1, 64, 63, 1, 130, 2), (1, 1, 1))

FLA_FAILURES = (
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
)
"""What a release that we don't fit, a missing compiler or a GPU without a kernel makes it raise.
Kernels are compiled on first use, so all of it shows in the check."""


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
    plain = TorchDelta()
    if shape.device.type != "cuda":
        return DeltaChoice(plain, f"the path of {shape.device.type}")
    try:
        candidate = FlaDelta(is_per_channel=shape.is_per_channel)
        difference = check_delta_kernels(candidate, shape)
    except FLA_FAILURES as exc:
        return DeltaChoice(plain, f"fla can't be used: {type(exc).__name__}: {exc}"[:300])
    if not difference <= TOLERANCE[shape.dtype]:
        return DeltaChoice(plain, f"fla differs from torch by {difference:.3g}")
    return DeltaChoice(candidate, f"differs from torch by {difference:.3g} at most")


@torch.inference_mode()
def check_delta_kernels(candidate: DeltaKernels, shape: DeltaShape) -> float:
    """The largest difference to plain torch in outputs and states, over batches of random content.

    Relative where torch's value is above one, absolute below. NaN if anything is not finite.
    """
    worst = 0.0
    for lengths in _CHECK_LENGTHS:
        rows = SequenceRows(lengths, shape.device)
        inputs, states = random_inputs(shape, sum(lengths), len(lengths))
        expected = apply_delta_rule(TorchDelta(), inputs, rows, states)
        actual = apply_delta_rule(candidate, inputs, rows, states)
        for wanted, found in zip(expected, actual, strict=True):
            wide = wanted.float()
            difference = ((wide - found.float()).abs() / wide.abs().clamp(min=1.0)).max()
            if not torch.isfinite(difference):
                return float("nan")
            worst = max(worst, float(difference))
    return worst


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
