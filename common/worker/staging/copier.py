"""Moves pieces between the pages of a pool and staging slots, converting element types on the way.

On the CPU by the transport's native list of copies, without the interpreter lock; on CUDA by
torch's index operations, on a stream of their own. Copies are complete when a call returns, because
the caller's next message lets another process read them. Knows nothing of peers or messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cache.cast import CACHE_DTYPES, cast_into
from common.engine.host_copy import upload
from common.planner.copy_plan import Int64Array
from common.planner.staging import Conversion, LinearCopy

Bytes = NDArray[np.uint8]
CopyRuns = Callable[[Bytes, Bytes, Int64Array, Int64Array, Int64Array], None]
"""(target, source, target offsets, source offsets, sizes)."""

ConvertFloat8 = Callable[[Bytes, Bytes, Int64Array, Int64Array, Int64Array, str, bool], None]
"""(target, source, target offsets, source offsets, element counts, the type that is not float8,
whether the target is float8)."""

FLOAT8 = "float8_e4m3fn"
WIDE = ("bfloat16", "float32")

Copy = tuple[Int64Array, Int64Array, Int64Array]
"""Target offsets, source offsets and sizes."""


class Copier:
    """The pool's buffers, one per page group, uint8[nbytes] each, on one device."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        copy_runs: CopyRuns,
        convert_float8: ConvertFloat8 | None = None,
    ) -> None:
        """convert_float8: quicker than torch's on a CPU, with the same results."""
        self._convert_float8 = convert_float8
        self._buffers = tuple(buffers)
        self._device = buffers[0].device
        self._copy_runs = copy_runs
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._device)
        # Before the engine's kernels where both could run: the I/O thread waits for these copies.
        self._stream = (
            torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            if self._device.type == "cuda"
            else None
        )

    @torch.inference_mode()
    def gather(self, copy: LinearCopy, conversion: Conversion, slot: Tensor) -> None:
        """Pages to a slot, in the wire's element type. slot: uint8[at least the piece]."""
        pages = self._buffers[copy.region]
        source, wire = conversion.source, conversion.wire
        runs = (copy.linear_offset, copy.page_offset, copy.nbytes)
        with self._on_stream():
            if source == wire:
                self._copy(slot, pages, runs)
            elif self._is_quick(source, wire):
                size = CACHE_DTYPES[source].itemsize
                counts = copy.nbytes // size
                self._convert_runs(slot, pages, copy.linear_offset // size, copy.page_offset,
                                   counts, source, is_narrowing=True)  # fmt: skip
            else:
                linear = self._take_scratch(copy.total_nbytes)
                self._copy(linear, pages, runs)
                narrow = linear.view(CACHE_DTYPES[source])
                wire_nbytes = len(narrow) * CACHE_DTYPES[wire].itemsize
                cast_into(slot[:wire_nbytes].view(CACHE_DTYPES[wire]), narrow)
        self._finish()

    @torch.inference_mode()
    def scatter(self, copy: LinearCopy, conversion: Conversion, slot: Tensor) -> None:
        """A slot to pages, in the target's element type."""
        pages = self._buffers[copy.region]
        target, wire = conversion.target, conversion.wire
        runs = (copy.page_offset, copy.linear_offset, copy.nbytes)
        with self._on_stream():
            if target == wire:
                self._copy(pages, slot, runs)
            elif self._is_quick(target, wire):
                size = CACHE_DTYPES[target].itemsize
                counts = copy.nbytes // size
                self._convert_runs(pages, slot, copy.page_offset, copy.linear_offset // size,
                                   counts, target, is_narrowing=False)  # fmt: skip
            else:
                linear = self._take_scratch(copy.total_nbytes)
                wide = linear.view(CACHE_DTYPES[target])
                wire_nbytes = len(wide) * CACHE_DTYPES[wire].itemsize
                cast_into(wide, slot[:wire_nbytes].view(CACHE_DTYPES[wire]))
                self._copy(pages, linear, runs)
        self._finish()

    def _is_quick(self, wide: str, wire: str) -> bool:
        """Whether a conversion is made while copying."""
        is_there = self._convert_float8 is not None and self._stream is None
        return is_there and wire == FLOAT8 and wide in WIDE

    def _convert_runs(
        self,
        target: Tensor,
        source: Tensor,
        target_offsets: Int64Array,
        source_offsets: Int64Array,
        counts: Int64Array,
        wide: str,
        *,
        is_narrowing: bool,
    ) -> None:
        assert self._convert_float8 is not None
        self._convert_float8(
            target.numpy(),
            source.numpy(),
            target_offsets,
            source_offsets,
            counts,
            wide,
            is_narrowing,
        )

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor, copy: Copy) -> None:
        if self._stream is None:
            self._copy_runs(target.numpy(), source.numpy(), *copy)
        else:
            copy_by_index(target, source, copy)

    def _take_scratch(self, nbytes: int) -> Tensor:
        """Memory that is kept: fresh memory costs more than the copy into it."""
        if len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch[:nbytes]


def copy_by_index(target: Tensor, source: Tensor, copy: Copy) -> None:
    """The same copies by index operations, in grains that divide every offset and size.

    target, source: uint8[nbytes]; the copies do not overlap.
    """
    target_offset, source_offset, nbytes = copy
    if len(nbytes) == 0:
        return
    grain = math.gcd(*(int(np.gcd.reduce(column)) for column in copy))
    counts = nbytes // grain
    # 0, 1, 2, ... within each run
    step = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    target_index = np.repeat(target_offset // grain, counts) + step
    source_index = np.repeat(source_offset // grain, counts) + step
    # In one copy, which the host does not wait for.
    to_index, from_index = upload(target.device, target_index, source_index)
    rows = _grains(source, grain).index_select(0, from_index)
    _grains(target, grain).index_copy_(0, to_index, rows)


def _grains(buffer: Tensor, grain: int) -> Tensor:
    count = len(buffer) // grain
    return buffer[: count * grain].view(count, grain)
