"""Our calls of the real flash-linear-attention."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernel_packages.packages import needs_packages, run_checks

pytestmark = [needs_packages, pytest.mark.slow]


def test_every_launch_has_the_arguments_that_its_kernel_takes() -> None:
    found = run_checks("fla_checks")
    assert len(found) == 7
    failed = [f"{name}\n{trace}" for name, trace in found.items() if trace]
    assert not failed, "\n".join(failed)


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which computes on a CPU too"
)
def test_a_step_computes_the_delta_rule() -> None:
    found = run_checks("fla_step_checks", TRITON_INTERPRET="1")
    failed = [f"{name}\n{trace}" for name, trace in found.items() if trace]
    assert found and not failed, "\n".join(failed)
