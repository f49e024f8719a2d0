"""What it takes to run something again from the same memory. CUDA graphs are one way to do it
(`cuda_graphs.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Recording(Protocol):
    """What was recorded, and the tensor that every replay writes its result to."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None: ...


Record = Callable[[Callable[[], Tensor]], Recording]
"""Runs a function some times, so that nothing in it is done for the first time, and records it."""
