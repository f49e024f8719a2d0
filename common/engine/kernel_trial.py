"""The comparison of faster kernels with plain torch at start.

A kernel that fails is not used: the server is slower, but it starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

KERNEL_FAILURES = (
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
    subprocess.SubprocessError,
)
"""Errors of a library in an unknown release, without a compiler, or without a kernel for the GPU.
Kernels are compiled on first use, so the comparison meets all of them."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T")
KernelsT = TypeVar("KernelsT", bound=Named)


def try_kernels(
    name: str,
    build_and_check: Callable[[], tuple[KernelsT, float]],
    tolerance: float,
    plain: KernelsT,
) -> tuple[KernelsT, str]:
    """(the kernels to use, and why). As `try_or_torch`, where the plain ones are an object too."""
    found, reason = try_or_torch(name, build_and_check, tolerance, plain.name)
    return plain if found is None else found, reason


def try_or_torch(
    name: str,
    build_and_check: Callable[[], tuple[T, float]],
    tolerance: float,
    plain_name: str = "torch",
) -> tuple[T | None, str]:
    """(the faster kernels, None to do without, and why).

    build_and_check: makes the faster ones, and returns with them their largest difference to the
        plain ones, NaN if anything is not finite.
    """
    try:
        candidate, difference = build_and_check()
    except ImportError as exc:
        return None, f"{name} can't be imported ({exc}); install {gpu_extra()}"[:300]
    except _failures() as exc:
        return None, f"{name} can't be used: {type(exc).__name__}: {exc}"[:300]
    if not difference <= tolerance:
        return None, f"{name} differs from {plain_name} by {difference:.3g}"
    return candidate, f"differs from {plain_name} by {difference:.3g} at most"


def _failures() -> tuple[type[Exception], ...]:
    """With what Triton raises, if anything has imported it: errors of no kind that Python has."""
    errors = sys.modules.get("triton.errors")
    return KERNEL_FAILURES if errors is None else (*KERNEL_FAILURES, errors.TritonError)


def give_memory_back(device: torch.device) -> None:
    """Free the memory of trials that torch keeps. Weights and pools are sized by free memory."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpu_extra() -> str:
    """The extra of this package that installs the kernel libraries, as pip spells it."""
    version = torch.version.cuda
    return f"baton[cuda{version.partition('.')[0]}]" if version else "baton[cuda12] or [cuda13]"


def largest_difference(expected: Tensor, actual: Tensor) -> float:
    """Relative where what is expected is above one, absolute below: roundings grow with the value.

    Not finite if either is not.
    """
    wide = expected.float()
    return float(((wide - actual.float()).abs() / wide.abs().clamp(min=1.0)).max())
