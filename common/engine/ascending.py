"""The numbers 0, 1, 2, .. on a device, made once: most indexes of a pass that decodes."""

from __future__ import annotations

import torch
from torch import Tensor

COUNT_START = 512


class Ascending:
    """int32 on one device. Memory that was given out is kept, for recordings go on reading it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[Tensor] = []

    def first(self, count: int) -> Tensor:
        """int32[count]: 0 .. count - 1."""
        if not self._made or count > len(self._made[-1]):
            size = max(COUNT_START, 1 << (count - 1).bit_length())
            self._made.append(torch.arange(size, dtype=torch.int32, device=self._device))
        return self._made[-1][:count]
