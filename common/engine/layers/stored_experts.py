"""Weights of all experts of a layer as small as a checkpoint stores them, made wide for a product.

Bit for bit what they would be if they had been made wide while loading: values are exact in the
model's dtype, and each product with a factor is rounded once to fp32 and once to that. So memory
is saved and time is not: what a product reads is written first, into memory that all layers share.
Where the host may ask which experts have rows, and where there are few rows, only theirs are made
wide. Measured on a CPU, one thread: five layers of 64 float8 experts in blocks, hidden size 1024,
eight experts a token: 1,006,632,960 bytes in bf16 and 503,439,360 as stored; the memory of a
process grew by 1041 and 609 MiB, and a token of one sequence took 2.5 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from common.engine.cache.cast import cast_into, raw
from common.engine.checkpoint.codes import Codes, has_groups_of
from common.engine.checkpoint.float4_groups import DOUBLED_MAGNITUDES

BLOCK_ROWS = 128
"""Rows that share their factors where factors are of blocks."""
FLOAT4_SCALE = 128
"""Of twice a 4-bit float, over the float8 whose exponent and mantissa end in its bits."""
INT4_ZERO = 8
FACTOR_DTYPES = (torch.int8, torch.bfloat16, torch.float16)
"""Narrower than fp32: the first in which all factors of an expert are exact."""


class Scratch:
    """Memory that layers write and read one after the other, as large as the largest needs."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, element_count: int, dtype: torch.dtype, device: torch.device) -> None:
        """While a model is loaded: nothing may have been given out of it."""
        if self._memory is None or self._memory.numel() < element_count:
            self._memory = None
            self._memory = torch.empty(element_count, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def view(self, *shape: int) -> Tensor:
        assert self._memory is not None, "it was reserved while loading"
        return self._memory[: torch.Size(shape).numel()].view(shape)


class StoredExperts:
    """W [experts, outputs, inputs], all of one form: that of `like`, which is one of them.

    4-bit values lie two in a byte. Factors lie in the narrowest type in which all are exact, one
    for a block of rows where its rows have the same.
    """

    def __init__(self, count: int, like: Codes) -> None:
        rows, columns = like.values.shape
        self.count, self.rows, self.columns = count, rows, columns
        self.way = "made wide for each product"
        self.is_float4 = like.is_float4
        self.is_packed = like.bits == 4 and columns % 2 == 0
        self.group_size, self._groups = like.group_size, like.groups
        self._like: Codes | None = like
        device = like.values.device
        self._values = (
            torch.empty(count, rows, columns // 2, dtype=torch.uint8, device=device)
            if self.is_packed
            else torch.empty(count, rows, columns, dtype=like.values.dtype, device=device)
        )
        self._kept: set[int] = set()
        self._scale_parts: list[Tensor] = [torch.empty(0)] * count
        self._zero_parts: list[Tensor] = [torch.empty(0)] * count
        self._scales = torch.empty(0)
        self._zeros: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return len(self._kept) == self.count

    @property
    def kept(self) -> Sequence[int]:
        return sorted(self._kept)

    @property
    def nbytes(self) -> int:
        zeros = 0 if self._zeros is None else self._zeros.nbytes
        return self._values.nbytes + self._scales.nbytes + zeros

    def exchange_halves(self) -> None:
        """The second half of each weight's rows comes first from here on."""
        self._values, self._scales = (
            torch.cat(raw(part).chunk(2, dim=1)[::-1], dim=1).view(part.dtype)
            for part in (self._values, self._scales)
        )

    @property
    def blocks(self) -> tuple[Tensor, Tensor] | None:
        """(values, fp32 factors of blocks of 128 x 128), all that there is of a weight of float8;
        None of others, or of blocks that are cut."""
        is_cut = self.columns % BLOCK_ROWS or self.rows // BLOCK_ROWS != self._scales.shape[1]
        if self._values.dtype != torch.float8_e4m3fn or is_cut or self.group_size != BLOCK_ROWS:
            return None
        return self._values, self._scales.float()

    @property
    def name(self) -> str:
        """Of the elements, and how they share factors."""
        kind = "float4" if self.is_float4 else str(self._values.dtype).removeprefix("torch.")
        if self.is_packed and not self.is_float4:
            kind = "int4"
        rows = self.rows // self._scales.shape[1] if self._scales.numel() else 1
        if self._scales.shape[-1] == 1:
            shared = "rows" if rows == 1 else f"{rows} rows"
        else:
            size = self.group_size or "some columns"
            shared = f"groups of {size}" if rows == 1 else f"blocks of {rows} x {size}"
        return f"{kind} by {shared}, {self.way}"

    def put(self, expert: int, codes: Codes) -> bool:
        """Keep one expert's weight; False if it has another form."""
        like = self._like
        assert like is not None, "no expert comes twice"
        if codes.form != like.form or codes.values.shape != like.values.shape:
            return False
        if not has_groups_of(codes, like):
            return False
        self._values[expert] = self._pack(codes.values)
        self._scale_parts[expert] = _smallest(_by_block(codes.scales))
        if codes.zeros is not None:
            self._zero_parts[expert] = _smallest(_by_block(codes.zeros))
        self._kept.add(expert)
        if self.is_whole:
            self._scales = _stack(self._scale_parts, self.rows)
            if codes.zeros is not None:
                self._zeros = _stack(self._zero_parts, self.rows)
            self._scale_parts, self._zero_parts, self._like = [], [], None
        return True

    def widen(self, out: Tensor, experts: Tensor | None = None) -> Tensor:
        """Write all weights into `out` [experts, outputs, inputs] of a float type, or those of
        `experts`, int64[n]. Returns `out`."""
        if experts is None:
            return self._fill(out, self._values, self._scales, self._zeros)
        chosen = raw(self._values)[experts]
        values = chosen.view(self._values.dtype)
        zeros = None if self._zeros is None else self._zeros[experts]
        return self._fill(out, values, self._scales[experts], zeros)

    def widen_one(self, out: Tensor, expert: int) -> Tensor:
        """Write one weight into `out` [outputs, inputs]. Returns `out`."""
        part = slice(expert, expert + 1)
        scales, zeros = self._scales[part], None if self._zeros is None else self._zeros[part]
        if self._like is not None:  # others are missing
            scales = self._scale_parts[expert][None]
            zeros = None if self._like.zeros is None else self._zero_parts[expert][None]
        self._fill(out[None], self._values[part], scales, zeros)
        return out

    # ----------------------------------------------------------------------------------------------

    def _pack(self, values: Tensor) -> Tensor:
        if not self.is_packed:
            return values
        codes = _float4_bits(values) if self.is_float4 else (values + INT4_ZERO).view(torch.uint8)
        pairs = codes.reshape(self.rows, self.columns // 2, 2)
        return pairs[..., 0] | pairs[..., 1] << 4

    def _fill(self, out: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        if not self.is_packed:
            cast_into(out, values)
        elif out.is_cpu:
            _unpack_by_table(out, values, is_float4=self.is_float4)
        else:
            _unpack(out, values, is_float4=self.is_float4)
        if zeros is not None:
            self._apply(Tensor.sub_, out, zeros)
        self._apply(Tensor.mul_, out, scales)
        return out

    def _apply(
        self, change: Callable[[Tensor, Tensor], Tensor], out: Tensor, of_groups: Tensor
    ) -> None:
        """Change each element by its group's. of_groups: [n, blocks of rows, groups]."""
        count, blocks, groups = of_groups.shape
        by_block = out.view(count, blocks, self.rows // blocks, self.columns)
        if groups > 1 and self._groups is None and self.columns % self.group_size == 0:
            by_group = by_block.view(*by_block.shape[:3], groups, self.group_size)
            change(by_group, of_groups[:, :, None, :, None])
            return
        if groups > 1 and self._groups is not None:
            of_groups = of_groups.index_select(-1, self._groups)
        elif groups > 1:
            of_groups = of_groups.repeat_interleave(self.group_size, -1)[..., : self.columns]
        change(by_block, of_groups[:, :, None])


def _by_block(of_rows: Tensor) -> Tensor:
    """[rows, groups] of each row to [blocks, groups], where the rows of a block have the same."""
    rows = len(of_rows)
    if rows % BLOCK_ROWS:
        return of_rows
    blocks = of_rows.view(rows // BLOCK_ROWS, BLOCK_ROWS, -1)
    return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else of_rows


def _smallest(factors: Tensor) -> Tensor:
    """The same numbers in the narrowest type; a copy."""
    for dtype in FACTOR_DTYPES:
        narrow = factors.to(dtype)
        if torch.equal(narrow.to(factors.dtype), factors):
            return narrow.clone()
    return factors.clone()


def _stack(parts: Sequence[Tensor], rows: int) -> Tensor:
    """[experts, blocks, groups] of parts that may differ in type and in how many rows share one."""
    if len({len(part) for part in parts}) > 1:
        parts = [part.repeat_interleave(rows // len(part), 0) for part in parts]
    if len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    return torch.stack(list(parts))


def _unpack(out: Tensor, values: Tensor, *, is_float4: bool) -> None:
    """Write the two elements of each byte of `values`."""
    halves = out.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    if not is_float4:
        halves[..., 0].copy_(values & 15)
        halves[..., 1].copy_(values >> 4)
        out.sub_(INT4_ZERO)
        return
    low = (values & 8) << 4 | (values & 7) << 2
    high = values & 128 | (values & 112) >> 2
    halves[..., 0].copy_(low.view(torch.float8_e4m3fn))
    halves[..., 1].copy_(high.view(torch.float8_e4m3fn))
    out.mul_(FLOAT4_SCALE)


def _unpack_by_table(out: Tensor, values: Tensor, *, is_float4: bool) -> None:
    """As `_unpack`, in one go; faster on a CPU. Takes memory for an index of each byte."""
    pairs = _pairs(out.dtype, is_float4)
    numbers = values.reshape(-1).to(torch.int32)
    torch.index_select(pairs, 0, numbers, out=out.view(pairs.dtype).view(-1))


@cache
def _pairs(dtype: torch.dtype, is_float4: bool) -> Tensor:
    """The two elements of every byte side by side."""
    doubled = [*DOUBLED_MAGNITUDES, *(-magnitude for magnitude in DOUBLED_MAGNITUDES)]
    values = torch.tensor(doubled) if is_float4 else torch.arange(16) - INT4_ZERO
    values, codes = values.to(dtype), torch.arange(256)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), dim=-1)
    return pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).view(-1)


def _float4_bits(doubled: Tensor) -> Tensor:
    """uint8 codes of 4-bit floats, of int8 that are twice their values."""
    places = doubled.reshape(-1).to(torch.int32) + DOUBLED_MAGNITUDES[-1]
    return _codes_of_doubled(doubled.device).index_select(0, places).view(doubled.shape)


@cache
def _codes_of_doubled(device: torch.device) -> Tensor:
    """uint8: the code of each number from the least on; of those that have one."""
    largest = DOUBLED_MAGNITUDES[-1]
    table = torch.zeros(2 * largest + 1, dtype=torch.uint8)
    for code, magnitude in enumerate(DOUBLED_MAGNITUDES):
        table[largest - magnitude] = code | 8
        table[largest + magnitude] = code
    return table.to(device)
