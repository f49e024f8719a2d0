"""Copies small arrays to the device and back without waiting for running kernels.

On CUDA a copy waits for all earlier launches unless the host's memory is pinned. Torch caches
pinned memory, and reuses a block only after its copies. On a CPU nothing is copied. Knows nothing
of the meaning of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32] | NDArray[np.uint8]

ALIGNMENT = 16
"""Bytes to which packed arrays are aligned: the widest element, and what a copy likes."""


def upload(device: torch.device, *arrays: Array) -> list[Tensor]:
    """The arrays on the device, in one copy. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = pack(arrays, is_pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def upload_into(target: Tensor, *arrays: Array) -> None:
    """Put the arrays at the front of uint8 memory that stays, in one copy; `unpack` finds them."""
    packed = pack(arrays, is_pinned=target.device.type == "cuda")
    target[: len(packed)].copy_(packed, non_blocking=True)


def pack(arrays: Sequence[Array], *, is_pinned: bool) -> Tensor:
    """uint8[..] on the host: the arrays, one after the other."""
    ends = np.cumsum([_packed_nbytes(array) for array in arrays])
    packed = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=is_pinned)
    for part, array in zip(unpack(packed, arrays), arrays, strict=True):
        part.numpy()[...] = array
    return packed


def unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Views of what `pack` made of arrays like these, wherever it lies by now."""
    views: list[Tensor] = []
    start = 0
    for array in arrays:
        part = packed[start : start + array.nbytes]
        views.append(part.view(_TORCH_TYPES[array.dtype.name]).view(array.shape))
        start += _packed_nbytes(array)
    return views


class HostCopy:
    """Tensors of one device on their way to the host.

    `wait` waits for what was launched until now and for nothing that is launched later. Any thread
    may call it, as often as it likes; what is copied must not be written any more.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            # Blocking: the waiting thread sleeps, and leaves its core to threads that compute.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


_TORCH_TYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def _packed_nbytes(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
