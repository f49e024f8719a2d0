"""Types of the native module."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Int64Array = NDArray[np.int64]
_ByteArray = NDArray[np.uint8]

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
