"""What the engine computes itself on a CPU: where torch takes many small kernels, or has none.

The one door to the native module. Every function here has a twin made of torch's operations beside
its caller, which runs wherever this one does not fit. No library had them: torch's own paged
attention (flex_attention) wants a block table as wide as the whole pool, for every head of every
sequence, and others' kernels for CPUs come with servers of their own or need AVX-512.
Knows nothing of models, pools or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from common.engine import _kernels
except ImportError as exc:  # built without, or by a compiler whose OpenMP is not torch's
    WHY_MISSING = str(exc)
    ARE_BUILT = False
else:
    WHY_MISSING = ""
    ARE_BUILT = True

LANES = 8
"""Rows are whole multiples of it."""

ELEMENTS = (torch.float32, torch.bfloat16)
"""What `attend` reads and writes; all else is fp32."""


def describe() -> str:
    """For the log and /server_info."""
    if not ARE_BUILT:
        return f"torch's alone: {WHY_MISSING}"
    return f"own, for {_kernels.instruction_set()}"


def fit(x: Tensor) -> bool:
    """Whether rows or heads x[T, dim] or x[T, heads, dim] can be given to `rms_norm`, `rotate` and
    `gated_silu`: fp32 on the CPU, a row's elements one after the other."""
    return (
        ARE_BUILT
        and x.dtype == torch.float32
        and x.is_cpu
        and x.shape[-1] % (2 * LANES) == 0
        and (x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2]))
        and x.stride(-1) == 1
    )


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """x / rms(x) over the last dimension, times weight [dim] or [heads, dim]; x as `fit` says."""
    head_count = x.shape[1] if x.dim() == 3 else 1
    dim = x.shape[-1]
    output = x.new_empty(x.shape)
    weight_address = weight_stride = 0
    if weight is not None:
        assert weight.is_contiguous() and weight.dtype == torch.float32, weight.dtype
        assert weight.shape in ((dim,), (head_count, dim)), weight.shape
        weight_address = weight.data_ptr()
        weight_stride = dim if weight.dim() == 2 else 0
    _kernels.rms_norm(
        output.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        weight_address,
        weight_stride,
        x.shape[0],
        head_count,
        dim,
        epsilon,
        torch.get_num_threads(),
    )
    return output


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads * cos + heads with swapped halves * sin, of heads[T, heads, dim] as `fit` says.

    cos, sin: fp32[T, 1, dim], contiguous.
    """
    row_count, head_count, dim = heads.shape
    assert cos.shape == sin.shape == (row_count, 1, dim), (cos.shape, heads.shape)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous() and sin.is_contiguous()
    output = heads.new_empty(heads.shape)
    _kernels.rotate(
        output.data_ptr(),
        heads.data_ptr(),
        heads.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        row_count,
        head_count,
        dim,
        torch.get_num_threads(),
    )
    return output


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of contiguous [T, 2 n] as `fit` says, the gate in the first half: [T, n]."""
    assert gate_up.is_contiguous()
    row_count, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(row_count, size)
    _kernels.gated_silu(
        output.data_ptr(), gate_up.data_ptr(), row_count, size, torch.get_num_threads()
    )
    return output


def write_items(view: Tensor, pages: Tensor, rows: Tensor, values: Tensor) -> None:
    """view[pages[t], :, rows[t]] = values[t]; view [page, unit, item, element], values
    [T, unit, element], both on the CPU and of one dtype; pages, rows: int64[T], contiguous."""
    row_count, unit_count, size = values.shape
    row_stride, unit_stride, element_stride = values.stride()
    if unit_stride != size or element_stride != 1:
        values = values.contiguous()
        row_stride = unit_count * size
    page_stride, view_unit_stride, item_stride, _ = view.stride()
    assert values.dtype == view.dtype and view.shape[1] == unit_count, (values.shape, view.shape)
    assert view.shape[3] == size == item_stride, (view.shape, view.stride())
    assert pages.dtype == rows.dtype == torch.int64 and pages.shape == rows.shape == (row_count,)
    assert pages.is_contiguous() and rows.is_contiguous()
    nbytes = view.itemsize
    _kernels.write_items(
        view.data_ptr(),
        page_stride * nbytes,
        view_unit_stride * nbytes,
        values.data_ptr(),
        row_stride * nbytes,
        pages.data_ptr(),
        rows.data_ptr(),
        row_count,
        unit_count,
        size * nbytes,
    )


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` takes heads and planes like these, on the CPU."""
    return (
        ARE_BUILT
        and query.is_cpu
        and query.dtype in ELEMENTS
        and keys.dtype == values.dtype
        and keys.dtype in ELEMENTS
        and keys.shape == values.shape
        and keys.stride() == values.stride()
        and query.shape[2] == keys.shape[3]
        and query.shape[2] % LANES == 0
        and query.stride()[1:] == (query.shape[2], 1)
    )


def attend(
    output: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rows: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
) -> None:
    """Softmax attention of one new token of each of B sequences to its pages, into `output`, of
    what `can_attend`.

    Sums depend on the sequence alone, not on the batch or the number of threads.

    output, query: [T, query heads, dim]; output contiguous. keys, values: strided views
        [page, KV head, item, dim]. rows: int64[B] of output and query. page_table: int32[B, pages].
    lengths: int32[B], tokens in the cache, the new one included; the last `window` of them are
        seen, all if it is 0.
    """
    _, head_count, page_items, dim = keys.shape
    page_stride, head_stride, item_stride, _ = keys.stride()
    sequence_count = rows.shape[0]
    assert item_stride == dim and query.shape[1] % head_count == 0, (query.shape, keys.shape)
    assert output.is_contiguous() and output.shape == query.shape and output.dtype == query.dtype
    assert lengths.shape[0] == page_table.shape[0] == sequence_count, (rows.shape, lengths.shape)
    assert rows.dtype == torch.int64 and rows.is_contiguous()
    assert lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    _kernels.attend(
        output.data_ptr(),
        output.stride(0),
        query.data_ptr(),
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        page_stride,
        head_stride,
        page_table.data_ptr(),
        page_table.stride(0),
        rows.data_ptr(),
        lengths.data_ptr(),
        sequence_count,
        head_count,
        query.shape[1] // head_count,
        dim,
        page_items,
        window,
        scale,
        query.dtype == torch.bfloat16,
        keys.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
