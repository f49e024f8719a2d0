"""The kernels that are our own: what they compute, and that they can be compiled."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernel_packages.packages import run_checks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs triton, which computes on a CPU too, and which torch brings on CUDA only",
    ),
]


@pytest.mark.parametrize(
    ("module", "environment"),
    [("triton_checks", {"TRITON_INTERPRET": "1"}), ("triton_compile_checks", {})],
)
def test_they_compute_as_torch_does_and_compile(module: str, environment: dict[str, str]) -> None:
    found = run_checks(module, **environment)
    failed = [f"{name}\n{trace}" for name, trace in found.items() if trace]
    assert found and not failed, "\n".join(failed)
