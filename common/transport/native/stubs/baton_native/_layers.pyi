"""Types of the native modules _layers_avx512 and _layers_avx2."""

def why_unusable() -> str: ...
def norm_rows(
    dtype: str,
    x: int,
    stride: int,
    added: int,
    output: int,
    count: int,
    size: int,
    weight: int,
    epsilon: float,
    is_offset: bool,
    /,
) -> None: ...
def gate_rows(
    dtype: str, x: int, stride: int, output: int, count: int, size: int, is_gelu: bool, /
) -> None: ...
def turn_heads(
    dtype: str,
    x: int,
    output: int,
    row_count: int,
    head_count: int,
    dim: int,
    row_stride: int,
    head_stride: int,
    weight: int,
    epsilon: float,
    is_offset: bool,
    angles: int,
    rotated: int,
    is_interleaved: bool,
    /,
) -> None: ...
