"""Types of the native module. See native/kernels.hpp for what each call computes; tensors are given
as addresses."""

from __future__ import annotations

def instruction_set() -> str: ...
def attend(
    output: int,
    output_stride: int,
    query: int,
    query_stride: int,
    keys: int,
    values: int,
    page_stride: int,
    head_stride: int,
    page_table: int,
    table_stride: int,
    rows: int,
    lengths: int,
    sequence_count: int,
    head_count: int,
    group: int,
    dim: int,
    page_items: int,
    window: int,
    scale: float,
    is_query_bfloat16: bool,
    is_cache_bfloat16: bool,
    thread_count: int,
) -> None: ...
def rms_norm(
    output: int,
    x: int,
    row_stride: int,
    weight: int,
    weight_stride: int,
    row_count: int,
    head_count: int,
    dim: int,
    epsilon: float,
    thread_count: int,
) -> None: ...
def rotate(
    output: int,
    x: int,
    row_stride: int,
    cos: int,
    sin: int,
    row_count: int,
    head_count: int,
    dim: int,
    thread_count: int,
) -> None: ...
def gated_silu(output: int, x: int, row_count: int, size: int, thread_count: int) -> None: ...
def write_items(
    plane: int,
    page_stride: int,
    unit_stride: int,
    values: int,
    value_stride: int,
    pages: int,
    rows: int,
    row_count: int,
    unit_count: int,
    item_nbytes: int,
) -> None: ...
