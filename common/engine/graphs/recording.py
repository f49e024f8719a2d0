"""Recordings: functions that run again over the same memory. On CUDA see `cuda_graphs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Recording(Protocol):
    """A recorded function, and the tensor to which every replay writes its result."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None: ...


Record = Callable[[Callable[[], Tensor]], Recording]
"""Runs a function some times, so that nothing in it is done for the first time, and records it."""
