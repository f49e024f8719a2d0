"""One token of every sequence through a short causal convolution, in one launch.

Libraries keep the last inputs of a channel in memory of their own. Ours lie in the slots of a
cache, whose pages other servers write, and a projection's features lie in the order of its
checkpoint. Importing this needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

COLUMN_BLOCK = 256
SEGMENTS_MAX = 3


@triton.jit  # type: ignore[untyped-decorator]
def _conv_step(  # type: ignore[no-untyped-def]
    projected,
    columns,
    firsts,
    sizes,
    weight,
    bias,
    states,
    read,
    write,
    out,
    token_count,
    token_stride,
    column_count,
    channel_count,
    page_stride,
    end_0,
    end_1,
    offset_1,
    offset_2,
    unit_0,
    unit_1,
    unit_2,
    unit_stride_0,
    unit_stride_1,
    unit_stride_2,
    has_bias: tl.constexpr,
    kernel_size: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    is_there = ids < column_count
    is_mixed = ids < channel_count
    column = tl.load(columns + ids, mask=is_there, other=0)
    x = tl.load(projected + token * token_stride + column, mask=is_there, other=0.0)
    # Where a channel's last inputs lie: by its segment, its unit there, and its place in that.
    is_second = ids >= end_0
    is_third = ids >= end_1
    start = tl.where(is_third, end_1, tl.where(is_second, end_0, 0))
    size = tl.where(is_third, unit_2, tl.where(is_second, unit_1, unit_0))
    stride = tl.where(is_third, unit_stride_2, tl.where(is_second, unit_stride_1, unit_stride_0))
    offset = tl.where(is_third, offset_2, tl.where(is_second, offset_1, 0))
    unit = (ids - start) // size
    place = (ids - start) - unit * size
    inside = offset + unit.to(tl.int64) * stride + place * (kernel_size - 1)
    source = states + tl.load(read + token) * page_stride + inside
    target = states + tl.load(write + token) * page_stride + inside
    taps = weight + ids * kernel_size
    total = tl.zeros((block,), tl.float32)
    for age in range(kernel_size - 1):
        kept = tl.load(source + age, mask=is_mixed, other=0.0)
        tap = tl.load(taps + age, mask=is_mixed, other=0.0)
        total += kept.to(tl.float32) * tap.to(tl.float32)
        if age > 0:
            tl.store(target + (age - 1), kept, mask=is_mixed)
    tl.store(target + (kernel_size - 2), x.to(states.dtype.element_ty), mask=is_mixed)
    last = tl.load(taps + (kernel_size - 1), mask=is_mixed, other=0.0)
    total += x.to(tl.float32) * last.to(tl.float32)
    if has_bias:
        total += tl.load(bias + ids, mask=is_mixed, other=0.0).to(tl.float32)
    # Rounded as the activation is given it.
    total = total.to(out.dtype.element_ty).to(tl.float32)
    mixed = tl.div_rn(total, 1.0 + tl.exp(-total)).to(out.dtype.element_ty)
    result = tl.where(is_mixed, mixed, x.to(out.dtype.element_ty))
    first = tl.load(firsts + ids, mask=is_there, other=0)
    width = tl.load(sizes + ids, mask=is_there, other=0)
    # Parts lie one behind the other, each of all tokens.
    place_out = first.to(tl.int64) * token_count + token * width + (ids - first)
    tl.store(out + place_out, result, mask=is_there)


def conv_step(
    projected: Tensor,
    columns: Tensor,
    firsts: Tensor,
    sizes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Sequence[Tensor],
    units: Sequence[int],
    read: Tensor,
    write: Tensor,
) -> Tensor:
    """silu(convolution) of the first channels of `projected` [T, width], the others as they are.

    columns, firsts, sizes: int32[N], of each feature that comes out: where it lies in a row, the
    first of its part, and how many that has. weight: [C, 1, K], of the first C of them; bias: [C].
    states: of up to three segments of those channels, [page, units, unit size * (K - 1)], the
    oldest first; they lie in one memory. units: channels of a unit of each. read, write: int64[T],
    the page before and after each token.
    Returns: [N * T], each part [T, size] behind the one before.
    """
    token_count, kernel_size = len(projected), weight.shape[-1]
    assert 1 <= len(states) <= SEGMENTS_MAX and projected.stride(1) == 1
    assert len({state.stride(0) for state in states}) == 1
    out = projected.new_empty(len(columns) * token_count)
    counts = [state.shape[1] * unit for state, unit in zip(states, units, strict=True)]
    ends = [sum(counts[: i + 1]) for i in range(SEGMENTS_MAX)]
    base, itemsize = states[0].data_ptr(), states[0].element_size()
    offsets = [(state.data_ptr() - base) // itemsize for state in states]
    strides = [state.stride(1) for state in states]
    missing = SEGMENTS_MAX - len(states)
    offsets, strides = offsets + [0] * missing, strides + [0] * missing
    _conv_step[(token_count, triton.cdiv(len(columns), COLUMN_BLOCK))](
        projected,
        columns,
        firsts,
        sizes,
        weight,
        weight if bias is None else bias,
        states[0],
        read,
        write,
        out,
        token_count,
        projected.stride(0),
        len(columns),
        len(weight),
        states[0].stride(0),
        ends[0],
        ends[1],
        offsets[1],
        offsets[2],
        *units,
        *[1] * missing,
        *strides,
        has_bias=bias is not None,
        kernel_size=kernel_size,
        block=COLUMN_BLOCK,
        num_warps=4,
    )
    return out
