"""Types of the native module."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Int64Array = NDArray[np.int64]
_ByteArray = NDArray[np.uint8]
_DigestArray = NDArray[np.uint64]

def copy_runs(
    target: _ByteArray,
    source: _ByteArray,
    target_offsets: _Int64Array,
    source_offsets: _Int64Array,
    nbytes: _Int64Array,
) -> None: ...
def convert_float8(
    target: _ByteArray,
    source: _ByteArray,
    target_offsets: _Int64Array,
    source_offsets: _Int64Array,
    counts: _Int64Array,
    wide: str,
    is_narrowing: bool,
) -> None: ...
def digest_pages(
    digests: _DigestArray, buffer: _ByteArray, ids: _Int64Array, page_nbytes: int
) -> None: ...
def save_pages(
    digests: _DigestArray,
    target: _ByteArray,
    source: _ByteArray,
    target_ids: _Int64Array,
    source_ids: _Int64Array,
    page_nbytes: int,
    piece_nbytes: int,
    pause_ratio: float,
) -> None: ...
