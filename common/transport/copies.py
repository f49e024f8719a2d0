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


Digests = NDArray[np.uint64]


def digest_pages(
    buffer: NDArray[np.uint8], page_ids: NDArray[np.int64], page_nbytes: int
) -> Digests:
    """One digest for each page of a buffer of whole pages, without the interpreter lock.

    Another value of any one word of 8 bytes gives another digest.
    Raises: ValueError if a page lies outside the buffer.
    """
    digests = np.empty(len(page_ids), dtype=np.uint64)
    _copies.digest_pages(digests, buffer, page_ids, page_nbytes)
    return digests


def save_pages(
    target: NDArray[np.uint8],
    source: NDArray[np.uint8],
    target_ids: NDArray[np.int64],
    source_ids: NDArray[np.int64],
    page_nbytes: int,
    *,
    piece_nbytes: int,
    pause_ratio: float,
) -> Digests:
    """Copies whole pages between two buffers, and digests what arrived, as `digest_pages` does.

    After every `piece_nbytes`, and at the end, nothing is copied for `pause_ratio` times as long as
    they took. The interpreter lock is not taken once in between: a thread that asks for it page by
    page holds up one that computes, which gives it up with every operation and then waits for it.
    Raises: ValueError if a page lies outside its buffer.
    """
    digests = np.empty(len(target_ids), dtype=np.uint64)
    _copies.save_pages(
        digests, target, source, target_ids, source_ids, page_nbytes, piece_nbytes, pause_ratio
    )
    return digests
