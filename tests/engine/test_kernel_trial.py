"""Which kernels run after a trial, and what is said of it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from common.engine.kernel_trial import largest_difference, try_kernels


@dataclass(frozen=True)
class Kernels:
    name: str


PLAIN, FAST = Kernels("plain"), Kernels("fast")


@pytest.mark.parametrize(
    ("difference", "chosen", "reason"),
    [
        (0.01, FAST, "differs from plain by 0.01 at most"),
        (0.02, PLAIN, "fast differs from plain by 0.02"),
        (math.nan, PLAIN, "fast differs from plain by nan"),
    ],
)
def test_kernels_run_only_if_they_agree(difference: float, chosen: Kernels, reason: str) -> None:
    assert try_kernels("fast", lambda: (FAST, difference), 0.01, PLAIN) == (chosen, reason)


@pytest.mark.parametrize(
    "failure",
    [
        subprocess.CalledProcessError(1, "nvcc"),
        torch.OutOfMemoryError("out of memory"),
    ],
)
def test_kernels_that_raise_do_not_stop_a_server(failure: Exception) -> None:
    def build_and_check() -> tuple[Kernels, float]:
        raise failure

    kernels, reason = try_kernels("fast", build_and_check, 0.01, PLAIN)
    assert kernels is PLAIN
    assert reason == f"fast can't be used: {type(failure).__name__}: {failure}"


def test_what_triton_raises_does_not_stop_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class TritonError(Exception):
        """Of no kind that Python has."""

    def build_and_check() -> tuple[Kernels, float]:
        raise TritonError("can't be compiled")

    with pytest.raises(TritonError):  # where nothing of Triton's is there
        try_kernels("fast", build_and_check, 0.01, PLAIN)
    module = ModuleType("triton.errors")
    vars(module)["TritonError"] = TritonError
    monkeypatch.setitem(sys.modules, "triton.errors", module)
    kernels, reason = try_kernels("fast", build_and_check, 0.01, PLAIN)
    assert kernels is PLAIN and "TritonError: can't be compiled" in reason


def test_a_library_that_is_not_there_is_answered_with_what_to_install() -> None:
    def build_and_check() -> tuple[Kernels, float]:
        raise ModuleNotFoundError("No module named 'fast'")

    kernels, reason = try_kernels("fast", build_and_check, 0.01, PLAIN)
    assert kernels is PLAIN
    assert "No module named 'fast'" in reason and "baton[cuda" in reason


def test_differences_are_relative_above_one_and_absolute_below() -> None:
    expected = torch.tensor([100.0, 0.001])
    assert largest_difference(expected, torch.tensor([101.0, 0.001])) == pytest.approx(0.01)
    assert largest_difference(expected, torch.tensor([100.0, 0.101])) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_no_finite_difference(wrong: float) -> None:
    fine, spoiled = torch.ones(3), torch.tensor([1.0, wrong, 1.0])
    assert not math.isfinite(largest_difference(fine, spoiled))
    assert not math.isfinite(largest_difference(spoiled, fine))
