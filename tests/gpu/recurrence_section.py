"""The gated delta rule on the device, against the CPU, and flash-linear-attention against it."""

from __future__ import annotations

import importlib.util

import torch

from common.engine.layers.choose_delta import (
    DeltaShape,
    check_delta_kernels,
    choose_delta_kernels,
    random_inputs,
)
from common.engine.layers.conv_step import ConvShape, choose_conv
from common.engine.layers.delta_rule import DeltaInputs, TorchDelta, apply_delta_rule
from common.engine.layers.gated_norm_fla import GatedNormShape, choose_gated_norm
from common.engine.layers.sequence_rows import SequenceRows
from tests.gpu.report import Section

CPU = torch.device("cpu")
# (key heads, value heads, dim, decay per channel): Qwen3-Next-80B-A3B whole and on one of 8 ranks,
# Kimi-Linear-48B-A3B on one of 4.
SHAPES = ((16, 32, 128, False), (2, 4, 128, False), (8, 8, 128, True))
LENGTHS = (1, 130, 64, 1)
TORCH_TOLERANCE = 1e-3
CONVOLUTIONS = ((4, False), (4, True))
GATED_SIZE = 128


def check_recurrence_section(section: Section, device: torch.device) -> None:
    for key_heads, heads, dim, is_per_channel in SHAPES:
        shape = DeltaShape(key_heads, heads, dim, dim, is_per_channel, torch.float32, device)
        name = f"delta rule {key_heads}/{heads} x {dim}" + (
            " per channel" if is_per_channel else ""
        )
        difference = _difference_to_cpu(shape)
        section.figure(f"{name} fp32, device against cpu", difference)
        section.check(f"{name} on the device", difference <= TORCH_TOLERANCE, f"{difference:.3g}")
    if device.type != "cuda":
        section.skip("fla", f"runs on CUDA only, this is {device}")
        return
    for kernel_size, has_bias in CONVOLUTIONS:
        conv = choose_conv(ConvShape(kernel_size, has_bias, torch.bfloat16, device))
        name = f"convolution of {kernel_size}, bias {has_bias}, as a single kernel"
        section.check(name, conv.step is not None, conv.reason)
    if importlib.util.find_spec("fla") is None:
        section.skip("fla", "is not installed; models that recur use plain torch here")
        return
    for key_heads, heads, dim, is_per_channel in SHAPES:
        shape = DeltaShape(key_heads, heads, dim, dim, is_per_channel, torch.bfloat16, device)
        choice = choose_delta_kernels(shape)
        name = f"fla {key_heads}/{heads} x {dim} bfloat16 per channel {is_per_channel}"
        section.check(name, choice.kernels.name == "fla", choice.reason)
        if choice.kernels.name == "fla":
            section.figure(f"{name} difference", check_delta_kernels(choice.kernels, shape))

    gated = choose_gated_norm(GatedNormShape(GATED_SIZE, torch.bfloat16, device))
    section.check("a norm and its gate as a single kernel", gated.kernel is not None, gated.reason)


def _difference_to_cpu(shape: DeltaShape) -> float:
    """The largest one in outputs and states."""
    inputs, states = random_inputs(shape, sum(LENGTHS), len(LENGTHS))
    on_cpu = DeltaInputs(
        inputs.query.cpu(),
        inputs.key.cpu(),
        inputs.value.cpu(),
        inputs.log_decay.cpu(),
        inputs.beta.cpu(),
    )
    actual = apply_delta_rule(TorchDelta(), inputs, SequenceRows(LENGTHS, shape.device), states)
    expected = apply_delta_rule(TorchDelta(), on_cpu, SequenceRows(LENGTHS, CPU), states.cpu())
    return max(
        float((wanted - found.cpu()).abs().max())
        for wanted, found in zip(expected, actual, strict=True)
    )
