"""One token of several sequences by fla in Triton's interpreter, against torch. Run by
`packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from common.engine.kernel_trial import largest_difference
from common.engine.layers.choose_delta import DeltaShape, random_inputs
from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.delta_rule import TorchDelta
from tests.kernel_packages.packages import report_checks

TOLERANCE = 1e-5


def a_step_is_the_rule(*, is_per_channel: bool) -> None:
    shape = DeltaShape(1, 2, 32, 32, is_per_channel, torch.float32, torch.device("cpu"))
    inputs, states = random_inputs(shape, 3, 3)
    expected = TorchDelta().step(inputs, states)
    actual = FlaDelta(is_per_channel=is_per_channel).step(inputs, states)
    for wanted, found in zip(expected, actual, strict=True):
        assert largest_difference(wanted, found) < TOLERANCE


CHECKS: dict[str, Callable[[], None]] = {
    "per head": partial(a_step_is_the_rule, is_per_channel=False),
    "per channel": partial(a_step_is_the_rule, is_per_channel=True),
}

if __name__ == "__main__":
    report_checks(CHECKS)
