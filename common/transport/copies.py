"""Copies of byte runs within this process, without the interpreter lock."""

from __future__ import annotations

import numpy as np
from baton_native import _copies
from numpy.typing import NDArray


def copy_runs(
    target: NDArray[np.uint8],
    source: NDArray[np.uint8],
    target_offsets: NDArray[np.int64],
    source_offsets: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> None:
    """Copies runs between two buffers of this process, without the interpreter lock.

    The caller has checked that every run lies in both buffers.
    """
    _copies.copy_runs(target, source, target_offsets, source_offsets, nbytes)


def convert_float8(
    target: NDArray[np.uint8],
    source: NDArray[np.uint8],
    target_offsets: NDArray[np.int64],
    source_offsets: NDArray[np.int64],
    counts: NDArray[np.int64],
    wide: str,
    is_narrowing: bool,
) -> None:
    """Copies runs of `counts` elements and turns them to or from float8_e4m3fn on the way.

    wide: the type at the other end, bfloat16 or float32. Offsets in bytes. Too large values are cut
    to 448; NaN stays NaN. Runs without the interpreter lock.
    Raises: ValueError if a run leaves its buffers.
    """
    _copies.convert_float8(
        target, source, target_offsets, source_offsets, counts, wide, is_narrowing
    )
