"""Weights that a checkpoint stores in several tensors: their names, shapes and values.

A format is data about which tensors belong to a weight, and how a slice of it becomes `Codes`.
Knows nothing of layers; how a slice gets out of a file is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import assert_never

import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes, group_columns
from common.engine.checkpoint.files import TensorEntry
from common.engine.checkpoint.float4_groups import unpack_groups
from common.engine.checkpoint.packed_integers import (
    AWQ_PLACES,
    WORD_BITS,
    centre,
    cut_whole,
    unpack_words,
)
from common.engine.config.weight_format import (
    Float4Groups,
    Float8Blocks,
    Float8Rows,
    Integers,
    MixedFormats,
    Packing,
    StoredFormat,
    WeightFormat,
    is_targeted,
)
from common.errors import ConfigError

FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
FLOAT8_DTYPE = "F8_E4M3"
# A power of two as its biased exponent.
EXPONENT_DTYPE = "F8_E8M0"
BYTE_DTYPE = "U8"
PACKED_DTYPES = ("I8", BYTE_DTYPE)
WORD_DTYPE = "I32"


class Role(StrEnum):
    """What one of a weight's tensors holds."""

    VALUES = "values"
    SCALES = "scales"
    ZEROS = "zeros"
    GROUPS = "groups"


WEIGHT = "weight"
# What stands in place of "weight", the tensors that every weight has first.
PACKED_SUFFIXES = {
    Packing.COMPRESSED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    Packing.AWQ: ("qweight", "scales", "qzeros", ""),
    Packing.GPTQ: ("qweight", "scales", "qzeros", "g_idx"),
}
FLOAT8_SCALE_SUFFIX = "_scale_inv"
SCALE_SUFFIXES = ("_scale", FLOAT8_SCALE_SUFFIX)
ZERO_SUFFIX = "_zero_point"
FLOAT4_SUFFIX = "_blocks"
FLOAT4_SCALE_SUFFIX = "_scales"
# Of products whose inputs are rounded by a factor that was found beforehand, and of the shape.
UNREAD_SUFFIXES = ("input_scale", "activation_scale", "input_zero_point", "weight_shape")
PART_SUFFIXES = {
    *(suffix for suffixes in PACKED_SUFFIXES.values() for suffix in suffixes if suffix),
    *(WEIGHT + suffix for suffix in (*SCALE_SUFFIXES, ZERO_SUFFIX)),
    *UNREAD_SUFFIXES,
}

Entries = Mapping[str, TensorEntry]
Parts = dict[Role, TensorEntry]
ReadSlice = Callable[[TensorEntry, tuple[slice, ...]], Tensor]


def find_format(
    name: str, entries: Entries, weight_format: WeightFormat
) -> tuple[StoredFormat, dict[Role, str]] | None:
    """The format of the weight that layers call `name` and the names of its tensors, of which
    files may lack some; None for a plain one."""
    if not isinstance(weight_format, MixedFormats):
        names = _part_names(name, entries, weight_format)
        return None if names is None else (weight_format, names)
    for targets, stored in weight_format.rules:
        names = _part_names(name, entries, stored)
        if names is not None:
            layer = entries[names[Role.VALUES]].name.rpartition(".")[0]
            if is_targeted(layer, targets):
                return stored, names
    return None


def weight_name(name: str) -> str:
    """What layers call the weight that a tensor seems to be a part of; `name` if of none."""
    layer, dot, last = name.rpartition(".")
    return layer + dot + WEIGHT if last in PART_SUFFIXES else name


def _part_names(name: str, entries: Entries, stored: StoredFormat) -> dict[Role, str] | None:
    match stored:
        case Float4Groups():
            if not name.endswith(FLOAT4_SUFFIX):
                return None
            scales = name.removesuffix(FLOAT4_SUFFIX) + FLOAT4_SCALE_SUFFIX
            return {Role.VALUES: name, Role.SCALES: scales}
        case Float8Blocks() | Float8Rows():
            if name not in entries or not _is_float8(entries[name], stored):
                return None
            default = SCALE_SUFFIXES[isinstance(stored, Float8Blocks)]
            found = [s for s in SCALE_SUFFIXES if name + s in entries]
            return {Role.VALUES: name, Role.SCALES: name + (found or [default])[0]}
        case Integers(packing=Packing.BYTES):
            if name not in entries or entries[name].dtype != "I8":
                return None
            names = [name, name + SCALE_SUFFIXES[0], name + ZERO_SUFFIX, ""]
        case Integers():
            bare = name.removesuffix(WEIGHT)
            names = [bare + suffix for suffix in PACKED_SUFFIXES[stored.packing]]
            if bare == name or names[0] not in entries:
                return None
        case _:
            assert_never(stored)
    needed = 3 if stored.has_zeros else 2
    return {
        role: part
        for place, (role, part) in enumerate(zip(Role, names, strict=True))
        if place < needed or part in entries
    }


def check_parts(parts: Parts, shape: tuple[int, ...], stored: StoredFormat) -> None:
    """shape: of the weight once it is wide.

    Raises: ConfigError naming the tensor whose shape or element type is another.
    """
    values, scales = parts[Role.VALUES], parts[Role.SCALES]
    match stored:
        case Float8Blocks(float4=Float4Groups(size)) if values.dtype in PACKED_DTYPES:
            *outer, columns = shape
            _check_groups(values, columns, size)
            _check_entry(values, [(*outer, columns // 2)], PACKED_DTYPES, "two elements a byte")
            what = f"one for each {size} elements"
            _check_entry(scales, [(*outer, columns // size)], (EXPONENT_DTYPE,), what)
        case Float8Blocks(rows, columns):
            if len(shape) < 2:
                raise ConfigError(
                    f"{values.path}: tensor {values.name} of float8 must have two dimensions"
                )
            _check_entry(values, [shape], (FLOAT8_DTYPE,))
            # Blocks at the edges may be cut short.
            blocks = (-(-shape[-2] // rows), -(-shape[-1] // columns))
            what = f"one for each {rows} x {columns}"
            _check_entry(scales, [(*shape[:-2], *blocks)], (*FLOAT_DTYPES, EXPONENT_DTYPE), what)
        case Float8Rows():
            _check_matrix(values, shape)
            _check_entry(values, [shape], (FLOAT8_DTYPE,))
            what = "one for all or for each row"
            _check_entry(scales, _shapes_of_rows(shape[0]), FLOAT_DTYPES, what)
        case Float4Groups(size):
            *outer, columns = shape
            _check_groups(values, columns, size)
            groups = (*outer, columns // size)
            _check_entry(values, [(*groups, size // 2)], (BYTE_DTYPE,), "two elements a byte")
            _check_entry(scales, [groups], (BYTE_DTYPE,), f"one for each {size} elements")
        case Integers():
            _check_integers(parts, shape, stored)
        case _:
            assert_never(stored)


def read_stored(
    read: ReadSlice,
    parts: Parts,
    shape: tuple[int, ...],
    take: tuple[slice, ...],
    stored: StoredFormat,
    device: torch.device,
) -> Codes:
    """The slice `take` of a weight of `shape`, on `device`."""
    values, scales = parts[Role.VALUES], parts[Role.SCALES]
    *outer, last = take
    match stored:
        case Float8Blocks(float4=Float4Groups(size)) if values.dtype in PACKED_DTYPES:
            groups, cut = cut_whole(last, shape[-1], size)
            packed = read(
                values, (*outer, slice(groups.start * size // 2, groups.stop * size // 2))
            )
            exponents = read(scales, (*outer, groups)).view(torch.uint8)
            packed = packed.view(torch.uint8).view(*packed.shape[:-1], -1, size // 2)
            return _float4_codes(packed.to(device), exponents.to(device), cut, size)
        case Float4Groups(size):
            groups, cut = cut_whole(last, shape[-1], size)
            packed = read(values, (*outer, groups, slice(None)))
            exponents = read(scales, (*outer, groups))
            return _float4_codes(packed.to(device), exponents.to(device), cut, size)
        case _:
            return _read_codes(read, parts, shape, take, stored).to(device)


def _float4_codes(packed: Tensor, exponents: Tensor, cut: slice, size: int) -> Codes:
    """Of whole groups; `cut`: the columns of them that are wanted."""
    values, scales = unpack_groups(packed, exponents)
    column_count = values.shape[-1]
    scales, groups = group_columns(scales, cut, column_count, size)
    if groups is not None:
        groups = groups.to(values.device)
    group_size = 0 if groups is not None else size
    return Codes(values[..., cut], scales, None, 4, group_size, groups, is_float4=True)


def _read_codes(
    read: ReadSlice,
    parts: Parts,
    shape: tuple[int, ...],
    take: tuple[slice, ...],
    stored: Float8Blocks | Float8Rows | Integers,
) -> Codes:
    columns, column_count = take[-1], shape[-1]
    scales = _read_all(read, parts[Role.SCALES]).float()
    zeros: Tensor | None = None
    index: Tensor | None = None
    bits, group_size = 8, 0
    match stored:
        case Float8Blocks(block_rows, group_size):
            values = read(parts[Role.VALUES], take)
            rows = torch.arange(shape[-2])[take[-2]] // block_rows
            scales = scales[take[:-2]].index_select(-2, rows)
        case Float8Rows():
            values = read(parts[Role.VALUES], take)
            scales = _of_rows(scales, shape[0], take[0])
        case Integers(bits, group_size, packing):
            values = _read_integers(read, parts[Role.VALUES], shape, take, stored)
            is_turned = packing in (Packing.AWQ, Packing.GPTQ)
            scales = _of_rows(scales.t() if is_turned else scales, shape[0], take[0])
            if Role.ZEROS in parts:
                found = _unpack_zeros(_read_all(read, parts[Role.ZEROS]), stored)
                zeros = _of_rows(found, shape[0], take[0]).float()
            if Role.GROUPS in parts and scales.shape[-1] > 1:
                index = read(parts[Role.GROUPS], (columns,)).long()
                _check_index(parts[Role.GROUPS], index, scales.shape[-1])
    if index is not None and not _is_in_order(index, columns, group_size):
        return Codes(values, scales, zeros, bits, 0, index)
    group_size = group_size or column_count
    if zeros is not None:
        zeros, _ = group_columns(zeros, columns, column_count, group_size)
    scales, index = group_columns(scales, columns, column_count, group_size)
    rounds = isinstance(stored, Float8Blocks) or stored.rounds_inputs
    return Codes(values, scales, zeros, bits, 0 if index is not None else group_size, index, rounds)


def _read_integers(
    read: ReadSlice,
    entry: TensorEntry,
    shape: tuple[int, ...],
    take: tuple[slice, ...],
    stored: Integers,
) -> Tensor:
    """int8[r, c], centred."""
    rows, columns = take
    per_word = WORD_BITS // stored.bits
    match stored.packing:
        case Packing.BYTES:
            return read(entry, take)
        case Packing.COMPRESSED:
            words, cut = cut_whole(columns, shape[1], per_word)
            codes = unpack_words(read(entry, (rows, words)), stored.bits)[:, cut]
        case Packing.GPTQ:
            words, cut = cut_whole(columns, shape[1], per_word)
            codes = unpack_words(read(entry, (words, rows)).t(), stored.bits)[:, cut]
        case Packing.AWQ:
            words, cut = cut_whole(rows, shape[0], per_word)
            found = unpack_words(read(entry, (columns, words)), stored.bits, AWQ_PLACES)
            codes = found[:, cut].t()
        case _:
            assert_never(stored.packing)
    return centre(codes.contiguous(), stored.bits)


def _unpack_zeros(zeros: Tensor, stored: Integers) -> Tensor:
    """int8[rows, groups], centred; there may be more rows, which fill the last word."""
    if stored.packing == Packing.BYTES:
        return zeros
    is_turned = stored.packing == Packing.COMPRESSED
    places = AWQ_PLACES if stored.packing == Packing.AWQ else None
    codes = unpack_words(zeros.t() if is_turned else zeros, stored.bits, places).t()
    # One too many wraps around, as it did when one was subtracted.
    codes = (codes + stored.zero_offset) & ((1 << stored.bits) - 1)
    return centre(codes, stored.bits)


def _of_rows(values: Tensor, row_count: int, rows: slice) -> Tensor:
    """[r, groups] of one for each group of every row, one for each row, or one for all."""
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    if len(values) == 1:
        values = values.expand(row_count, -1)
    return values[:row_count][rows]


def _is_in_order(index: Tensor, columns: slice, group_size: int) -> bool:
    first = columns.start or 0
    return torch.equal(index, torch.arange(first, first + len(index)) // group_size)


def _read_all(read: ReadSlice, entry: TensorEntry) -> Tensor:
    return read(entry, tuple(slice(None) for _ in entry.shape))


def _is_float8(entry: TensorEntry, stored: Float8Blocks | Float8Rows) -> bool:
    return entry.dtype == FLOAT8_DTYPE or (
        isinstance(stored, Float8Blocks)
        and stored.float4 is not None
        and entry.dtype in PACKED_DTYPES
    )


def _shapes_of_rows(row_count: int) -> list[tuple[int, ...]]:
    return [(row_count, 1), (row_count,), (), (1,), (1, 1)]


def _check_matrix(values: TensorEntry, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ConfigError(
            f"{values.path}: tensor {values.name} of {len(shape)} dimensions must be plain: "
            f"factors are read for two"
        )


def _check_integers(parts: Parts, shape: tuple[int, ...], stored: Integers) -> None:
    values = parts[Role.VALUES]
    _check_matrix(values, shape)
    rows, columns = shape
    per_word = WORD_BITS // stored.bits
    group_count = -(-columns // stored.group_size) if stored.group_size else 1
    what = f"one for each {stored.group_size or columns} elements"
    row_words, column_words = -(-rows // per_word), -(-columns // per_word)
    scale_shapes: list[tuple[int, ...]] = [(rows, group_count)]
    if not stored.group_size:
        scale_shapes = _shapes_of_rows(rows)
    match stored.packing:
        case Packing.BYTES:
            value_shape, zero_shapes = shape, scale_shapes
        case Packing.COMPRESSED:
            value_shape, zero_shapes = (rows, column_words), [(row_words, group_count)]
        case Packing.GPTQ:
            value_shape, zero_shapes = (column_words, rows), [(group_count, row_words)]
            scale_shapes = [(group_count, rows)]
        case Packing.AWQ:
            value_shape, zero_shapes = (columns, row_words), [(group_count, row_words)]
            scale_shapes = [(group_count, rows)]
        case _:
            assert_never(stored.packing)
    dtype = "I8" if stored.packing == Packing.BYTES else WORD_DTYPE
    held = f"{stored.bits} bits an element"
    _check_entry(values, [value_shape], (dtype,), held)
    _check_entry(parts[Role.SCALES], scale_shapes, FLOAT_DTYPES, what)
    if Role.ZEROS in parts:
        _check_entry(parts[Role.ZEROS], zero_shapes, (dtype,), what)
    if Role.GROUPS in parts:
        _check_entry(parts[Role.GROUPS], [(columns,)], (WORD_DTYPE,), "a group for each column")


def _check_index(entry: TensorEntry, index: Tensor, count: int) -> None:
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= count:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} holds {low if low < 0 else high}: must hold "
            f"groups in 0..{count - 1}"
        )


def _check_groups(values: TensorEntry, columns: int, size: int) -> None:
    if columns % size != 0:
        raise ConfigError(
            f"{values.path}: tensor {values.name} has rows of {columns} elements: "
            f"must be a multiple of {size}, the elements that share a scale"
        )


def _check_entry(
    entry: TensorEntry,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[str, ...],
    what: str = "",
) -> None:
    if entry.shape not in shapes or entry.dtype not in dtypes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}: must be "
            f"{allowed} of {', '.join(dtypes)}{', ' if what else ''}{what}"
        )
