"""Element types of a cache: torch's names for them, and turning one into another.

A value that float16 or float8 can't hold is cut to the largest they can, never made infinite or
NaN; NaN stays NaN. float8_e4m3fn is stored with scale 1.0, so its largest value is 448.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Element types that a model may be computed in."""

CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
"""Element types that a cache may be stored in."""

FLOAT16_MAX = torch.finfo(torch.float16).max
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in another type, of the same shape and on the same device; the same if it fits."""
    if values.dtype == dtype:
        return values
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    cast_into(out, values)
    return out


def cast_into(out: Tensor, values: Tensor) -> None:
    """`values` in the type of `out`, a contiguous tensor of the same shape and device.

    Memory that is there already takes a fraction of the time of fresh memory.
    """
    if values.dtype == torch.float8_e4m3fn and values.device.type == "cpu":
        _widen_by_table(out, values)
    elif out.dtype == torch.float8_e4m3fn and not _cuts_float8(values.device):
        out.copy_(values.clamp(-FLOAT8_MAX, FLOAT8_MAX))
    else:
        # bfloat16 has the exponents of float32: only what rounds beyond its last value overflows.
        out.copy_(values)
        if out.dtype == torch.float16:
            out.clamp_(-FLOAT16_MAX, FLOAT16_MAX)


def raw(values: Tensor) -> Tensor:
    """The same memory as something that every kernel takes: float8 as bytes, others as they are."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


@cache
def _cuts_float8(device: torch.device) -> bool:
    """Whether torch's own conversion cuts instead of making NaN; its versions differ."""
    too_large = torch.tensor([1e30], device=device).to(torch.float8_e4m3fn)
    return not bool(too_large.float().isnan().any())


def _widen_by_table(out: Tensor, values: Tensor) -> None:
    """There are 256 of them; torch's own conversion takes 6 times longer on a CPU."""
    numbers = values.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    torch.index_select(_table(out.dtype), 0, numbers, out=out.view(-1))


@cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
