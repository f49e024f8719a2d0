"""Recordings of decode passes as CUDA graphs, and which sizes are worth one.

Runs on CUDA only. `decode_graphs.py` has the recorded pass and its inputs, and is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UP_COUNT = 2
"""Runs before a recording, on a stream beside the main one: libraries take memory and choose
kernels in the first ones, which a recording must not contain."""

SMALL_SIZES = (1, 2, 4)
SIZE_STEPS = ((8, 160), (32, 512), (128, 4096))
"""Sizes above are multiples of the first of each, up to the second. A padding row costs next to
nothing where a pass mostly reads weights; more sizes cost start-up time and memory."""


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """See `Recording`."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Records on one device; all recordings share their memory, for only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> CudaRecording:
        """See `Record`. Raises: RuntimeError for what CUDA can't record."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_COUNT):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            output = compute()
        return CudaRecording(graph, output)


def recorded_sizes(size_max: int) -> list[int]:
    """Batch sizes up to `size_max`, which is the last one: 1, 2, 4, 8, 16, 24, ..."""
    sizes, last = list(SMALL_SIZES), 0
    for step, end in SIZE_STEPS:
        sizes += range(last + step, end + 1, step)
        last = end
    return [size for size in sizes if size < size_max] + [size_max]
