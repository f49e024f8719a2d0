"""Tensors of a checkpoint that come with a second tensor of scales: their names, shapes and values.

Knows nothing of layers; how a slice gets out of a file is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from common.engine.checkpoint.block_scales import scale_blocks
from common.engine.checkpoint.files import TensorEntry
from common.engine.checkpoint.float4_groups import widen_groups
from common.engine.config.weight_format import Float4Groups, Float8Blocks, WeightFormat
from common.errors import ConfigError

FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
FLOAT8_DTYPE = "F8_E4M3"
# A power of two as its biased exponent.
EXPONENT_DTYPE = "F8_E8M0"
BYTE_DTYPE = "U8"
PACKED_DTYPES = ("I8", BYTE_DTYPE)
FLOAT8_SCALE_SUFFIX = "_scale_inv"
FLOAT4_SUFFIX = "_blocks"
FLOAT4_SCALE_SUFFIX = "_scales"

ReadSlice = Callable[[TensorEntry, tuple[slice, ...]], Tensor]


def is_scaled(name: str, entry: TensorEntry, weight_format: WeightFormat) -> bool:
    """Whether the tensor that layers call `name` needs scales."""
    match weight_format:
        case Float8Blocks():
            return entry.dtype == FLOAT8_DTYPE or _is_packed(entry, weight_format)
        case Float4Groups():
            return name.endswith(FLOAT4_SUFFIX)
        case _:
            assert_never(weight_format)


def scales_name(name: str, weight_format: WeightFormat) -> str:
    """Name of the scales of a tensor that `is_scaled`."""
    match weight_format:
        case Float8Blocks():
            return name + FLOAT8_SCALE_SUFFIX
        case Float4Groups():
            return name.removesuffix(FLOAT4_SUFFIX) + FLOAT4_SCALE_SUFFIX
        case _:
            assert_never(weight_format)


def check_scaled(
    values: TensorEntry, scales: TensorEntry, shape: tuple[int, ...], weight_format: WeightFormat
) -> None:
    """shape: of the tensor once its scales are multiplied out.

    Raises: ConfigError naming the tensor whose shape or element type is another.
    """
    match weight_format:
        case Float8Blocks(float4=Float4Groups(size)) if _is_packed(values, weight_format):
            *outer, columns = shape
            _check_groups(values, columns, size)
            _check_entry(values, (*outer, columns // 2), PACKED_DTYPES, "two elements a byte")
            what = f"one for each {size} elements"
            _check_entry(scales, (*outer, columns // size), (EXPONENT_DTYPE,), what)
        case Float8Blocks(rows, columns):
            if len(shape) < 2:
                raise ConfigError(
                    f"{values.path}: tensor {values.name} of float8 must have two dimensions"
                )
            _check_entry(values, shape, (FLOAT8_DTYPE,))
            # Blocks at the edges may be cut short.
            blocks = (-(-shape[-2] // rows), -(-shape[-1] // columns))
            what = f"one for each {rows} x {columns}"
            _check_entry(scales, (*shape[:-2], *blocks), (*FLOAT_DTYPES, EXPONENT_DTYPE), what)
        case Float4Groups(size):
            *outer, columns = shape
            _check_groups(values, columns, size)
            groups = (*outer, columns // size)
            _check_entry(values, (*groups, size // 2), (BYTE_DTYPE,), "two elements a byte")
            _check_entry(scales, groups, (BYTE_DTYPE,), f"one for each {size} elements")
        case _:
            assert_never(weight_format)


def read_scaled(
    read: ReadSlice,
    values: TensorEntry,
    scales: TensorEntry,
    shape: tuple[int, ...],
    take: tuple[slice, ...],
    weight_format: WeightFormat,
    device: torch.device,
) -> Tensor:
    """fp32 values of the slice `take` of a tensor of `shape`; on `device` if that is cheaper."""
    match weight_format:
        case Float8Blocks(float4=Float4Groups(size)) if _is_packed(values, weight_format):
            *outer, last = take
            groups, cut = _groups_of(last, shape[-1], size)
            packed = read(
                values, (*outer, slice(groups.start * size // 2, groups.stop * size // 2))
            )
            exponents = read(scales, (*outer, groups)).view(torch.uint8)
            packed = packed.view(torch.uint8).view(*packed.shape[:-1], -1, size // 2)
            return widen_groups(packed.to(device), exponents.to(device))[..., cut]
        case Float8Blocks(rows, columns):
            factors = read(scales, tuple(slice(None) for _ in scales.shape)).float()
            return scale_blocks(read(values, take), factors, shape, take, (rows, columns))
        case Float4Groups(size):
            *outer, last = take
            groups, cut = _groups_of(last, shape[-1], size)
            wide = widen_groups(
                read(values, (*outer, groups, slice(None))).to(device),
                read(scales, (*outer, groups)).to(device),
            )
            return wide[..., cut]
        case _:
            assert_never(weight_format)


def _is_packed(entry: TensorEntry, weight_format: Float8Blocks) -> bool:
    return weight_format.float4 is not None and entry.dtype in PACKED_DTYPES


def _groups_of(columns: slice, column_count: int, size: int) -> tuple[slice, slice]:
    """The groups that hold some columns, and the columns in them.

    A rank's columns may begin and end inside a group; whole groups are read and cut.
    """
    start, stop, _ = columns.indices(column_count)
    groups = slice(start // size, -(-stop // size))
    first = groups.start * size
    return groups, slice(start - first, stop - first)


def _check_groups(values: TensorEntry, columns: int, size: int) -> None:
    if columns % size != 0:
        raise ConfigError(
            f"{values.path}: tensor {values.name} has rows of {columns} elements: "
            f"must be a multiple of {size}, the elements that share a scale"
        )


def _check_entry(
    entry: TensorEntry, shape: tuple[int, ...], dtypes: tuple[str, ...], what: str = ""
) -> None:
    if entry.shape != shape or entry.dtype not in dtypes:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}: must be "
            f"{list(shape)} of {', '.join(dtypes)}{', ' if what else ''}{what}"
        )
