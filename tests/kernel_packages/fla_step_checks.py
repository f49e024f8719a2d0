"""One token of several sequences by fla in Triton's interpreter, against torch. Run by
`packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from triton.runtime.autotuner import Autotuner

from common.engine.kernel_trial import largest_difference
from common.engine.layers.choose_delta import DeltaShape, random_gates, random_inputs
from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.delta_rule import TorchDelta
from common.engine.layers.gated_norm_fla import GatedNormShape, check_gated_norm, make_gated_norm
from tests.kernel_packages.packages import report_checks

TOLERANCE = 1e-5


def a_step_is_the_rule(*, is_per_channel: bool) -> None:
    shape = DeltaShape(1, 2, 32, 32, is_per_channel, torch.float32, torch.device("cpu"))
    inputs, states = random_inputs(shape, 3, 3)
    expected = TorchDelta().step(inputs, states)
    actual = FlaDelta(is_per_channel=is_per_channel).step(inputs, states)
    for wanted, found in zip(expected, actual, strict=True):
        assert largest_difference(wanted, found) < TOLERANCE


def gates_are_made_on_the_way() -> None:
    shape = DeltaShape(1, 2, 32, 32, False, torch.float32, torch.device("cpu"))
    inputs, states = random_inputs(shape, 3, 3)
    heads = (inputs.query, inputs.key, inputs.value)
    kernels = FlaDelta(is_per_channel=False)
    assert kernels._takes_gates
    expected, actual = (
        k.step_gated(*heads, random_gates(shape, 3), states) for k in (TorchDelta(), kernels)
    )
    for wanted, found in zip(expected, actual, strict=True):
        assert largest_difference(wanted, found) < TOLERANCE


def norms_are_gated() -> None:
    # Nothing is timed here: the first of its configurations is the best one.
    Autotuner._bench = lambda *args, **options: [0.0] * 3
    for size in (64, 128):
        shape = GatedNormShape(size, torch.float32, torch.device("cpu"))
        assert check_gated_norm(make_gated_norm(), shape) < TOLERANCE


CHECKS: dict[str, Callable[[], None]] = {
    "per head": partial(a_step_is_the_rule, is_per_channel=False),
    "per channel": partial(a_step_is_the_rule, is_per_channel=True),
    "gates_are_made_on_the_way": gates_are_made_on_the_way,
    "norms_are_gated": norms_are_gated,
}

if __name__ == "__main__":
    report_checks(CHECKS)
