"""Our calls of the real flash-linear-attention, whose kernels compute nothing.

Run by `packages.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from types import ModuleType

import torch

from common.engine.layers.choose_delta import DeltaShape, random_gates, random_inputs
from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.gated_norm_fla import make_gated_norm
from common.engine.layers.sequence_rows import SequenceRows
from tests.kernel_packages import interpreted_triton
from tests.kernel_packages.interpreted_triton import LAUNCHES
from tests.kernel_packages.packages import report_checks

CPU = torch.device("cpu")
# Heads as Qwen3-Next and Kimi-Linear have them on one of eight ranks.
SHAPE = DeltaShape(2, 4, 128, 128, False, torch.bfloat16, CPU)
LENGTHS = (1, 64, 63, 1, 130, 2)


def bound(function: Callable[..., object]) -> Callable[..., object]:
    """`function`, where every option must be one of its parameters: it ignores others."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: object, **options: object) -> object:
        for name in signature.bind(*args, **options).arguments:
            kind = signature.parameters[name].kind
            assert kind is not inspect.Parameter.VAR_KEYWORD, (
                f"{function.__name__} has no {options}"
            )
        return function(*args, **options)

    return call


def note_host_starts(module: ModuleType, found: list[object]) -> None:
    prepare = vars(module)["prepare_chunk_indices"]

    def noted(*args: object, cu_seqlens_cpu: object = None, **options: object) -> object:
        found.append(cu_seqlens_cpu)
        return prepare(*args, cu_seqlens_cpu=cu_seqlens_cpu, **options)

    vars(module)["prepare_chunk_indices"] = noted


def calls_fit(*, is_per_channel: bool, dtype: torch.dtype) -> None:
    from fla.ops import gated_delta_rule, kda

    host_starts: list[object] = []
    for module in (gated_delta_rule, kda):
        note_host_starts(sys.modules[f"{module.__name__}.chunk"], host_starts)
        for name in dir(module):
            if name.startswith(("chunk_", "fused_recurrent_")) and callable(vars(module)[name]):
                setattr(module, name, bound(vars(module)[name]))
    shape = replace(SHAPE, is_per_channel=is_per_channel, dtype=dtype)
    kernels = FlaDelta(is_per_channel=is_per_channel)
    assert kernels._takes_host_starts
    for lengths in (LENGTHS, (1, 1, 1)):
        inputs, states = random_inputs(shape, sum(lengths), len(lengths))
        LAUNCHES.names.clear()
        if max(lengths) == 1:
            outputs, after = kernels.step(inputs, states)
            if not is_per_channel:
                heads = (inputs.query, inputs.key, inputs.value)
                gates = random_gates(shape, len(lengths))
                outputs, after = kernels.step_gated(*heads, gates, states)
        else:
            rows = SequenceRows(lengths, CPU)
            outputs, after = kernels.run(inputs, rows, states)
            # With these, the number of chunks is known without asking the device.
            assert host_starts and all(starts is rows.host_starts for starts in host_starts)
        assert LAUNCHES.names
        assert outputs.shape == inputs.value.shape and outputs.dtype == dtype
        assert after.shape == states.shape and after.dtype == torch.float32


def norms_are_gated_in_one_launch() -> None:
    hidden, gate = torch.zeros(2, 3, 4, 128, dtype=torch.bfloat16)
    LAUNCHES.names.clear()
    found = make_gated_norm()(hidden, gate, torch.ones(128, dtype=torch.bfloat16), 1e-6)
    assert found.shape == hidden.shape and found.dtype == hidden.dtype
    assert LAUNCHES.names == ["layer_norm_gated_fwd_kernel"]


CHECKS: dict[str, Callable[[], None]] = {
    f"{'per channel' if is_per_channel else 'per head'}, {dtype}".replace("torch.", ""): partial(
        calls_fit, is_per_channel=is_per_channel, dtype=dtype
    )
    for is_per_channel in (False, True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
} | {"norms_are_gated_in_one_launch": norms_are_gated_in_one_launch}

if __name__ == "__main__":
    interpreted_triton.install()
    report_checks(CHECKS)
