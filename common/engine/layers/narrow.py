"""Products with weights that stay as small as a checkpoint stores them, where there are kernels.

float8 is in `float8.py`. Both kernels of a CPU are torch's. Measured with one thread on an AMD EPYC
with AVX-512 VNNI, 4096 x 4096 out of cache, speed over packed bf16 for 1, 2, 4, 8, 16, 128 and 512
rows of inputs:
int8: 1.7, 1.5, 1.5, 1.5, 1.6, 1.7, 1.7 (1024 x 1024: 0.9 to 1.2);
int4: 2.2, 2.0, 1.0, 0.7, 0.5, 0.4, 0.4; made wide for one product, 512 to 2048 rows: 0.6 to 0.8.
So int8 is as fast for any number of rows, and int4 is not: it is for those who want its memory.
Weights of int8 whose inputs are not rounded have no such kernel: `_weight_int8pack_mm` was slower
from four rows on (0.8, then 0.4), and it reads behind the end of rows that vectors don't divide.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.layers.float8 import Float8Product, choose_float8

INT8_ELEMENTS_MIN = 1 << 20
"""Of smaller weights, rounding the inputs costs more than the product saves."""
INT8_MAX = 127
INT8_ZERO = 128
INT4_GROUPS = (256, 128, 64, 32)
"""Neighbours that share a factor, as the kernel can have them."""
INT4_ROWS = 16
"""The kernel takes whole blocks of so many outputs."""
INT4_WIDENED_ROWS = 256
"""Inputs from which on making the weight wide for one product is faster than the kernel."""
INT4_BLOCKS = (64, 32)
"""Outputs that lie together once packed, as wide as this CPU's vectors."""


class NarrowWeights(StrEnum):
    """Which quantised weights stay narrow.

    AUTO: those whose products are as fast as wide ones, and experts on CUDA. NARROW: all that a
    kernel multiplies by, and experts.
    """

    AUTO = "auto"
    NARROW = "narrow"
    WIDE = "wide"


class Int8Product:
    """Rows of int8 with a factor each, times inputs that are rounded to int8, token by token.

    The sums are exact integers, so a row's product does not depend on the rest of a batch.
    """

    name = "int8 by rows and tokens, onednn::qlinear_pointwise"

    def __init__(self, codes: Codes) -> None:
        self._values = torch.ops.onednn.qlinear_prepack(codes.values.contiguous(), None)
        self._scales = codes.scales[:, 0].contiguous()
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int32)
        self.nbytes = codes.values.nbytes + self._scales.nbytes + self._zeros.nbytes

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        largest = inputs.abs().amax(dim=-1, keepdim=True).float()
        steps = largest.clamp_(min=torch.finfo(torch.float32).tiny).div_(INT8_MAX)
        codes = (inputs / steps).round_().add_(INT8_ZERO).to(torch.uint8)
        product = _multiply_int8(codes, self._values, self._scales, self._zeros).mul_(steps)
        return (product if bias is None else product.add_(bias)).to(inputs.dtype)

    @staticmethod
    def fits(codes: Codes, narrow: NarrowWeights) -> bool:
        values = codes.values
        return (
            values.dtype == torch.int8
            and codes.rounds_inputs
            and codes.zeros is None
            and codes.groups is None
            and codes.scales.shape[-1] == 1
            and values.device.type == "cpu"
            and (narrow == NarrowWeights.NARROW or values.numel() >= INT8_ELEMENTS_MIN)
            and _has_exact_int8()
        )


class Int4Product:
    """Rows of 4-bit integers whose neighbours share a factor and a zero point, times bf16."""

    def __init__(self, codes: Codes, group_size: int) -> None:
        self.group_size = group_size
        self.name = f"int4 by groups of {group_size}, aten::_weight_int4pack_mm_for_cpu"
        values = codes.values
        self._shape = tuple(values.shape)
        self._packed = _pack_int4(values)
        group_count = values.shape[1] // group_size
        scales, zeros = codes.scales, codes.zeros
        offsets = torch.zeros_like(scales) if zeros is None else -zeros * scales
        both = torch.stack((scales, offsets), dim=-1)
        if both.shape[1] != group_count:
            repeats = -(-group_count // both.shape[1])
            both = both.repeat_interleave(repeats, dim=1)[:, :group_count]
        self._scales = both.transpose(0, 1).to(torch.bfloat16).contiguous()
        self._block = _int4_block() if self._shape[0] % INT4_BLOCKS[0] == 0 else 0
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, self._shape[1])
        if self._block and len(rows) >= INT4_WIDENED_ROWS:
            product = rows @ self._widen()
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows.contiguous(), self._packed, self.group_size, self._scales
            )
        product = product.view(*inputs.shape[:-1], -1)
        return product if bias is None else product + bias

    def _widen(self) -> Tensor:
        """W^T bf16[inputs, outputs]."""
        outputs, inputs = self._shape
        size, block = self.group_size, self._block
        packed = self._packed.view(outputs // block, inputs // size, size, block // 2)
        factors = self._scales.view(inputs // size, 1, outputs // block, 2, block // 2, 2)
        wide = self._scales.new_empty(inputs // size, size, outputs // block, 2, block // 2)
        for place, codes in enumerate(packed):
            for half, values in enumerate((codes & 15, codes >> 4)):
                scales, offsets = factors[:, :, place, half].unbind(-1)
                centred = values.to(torch.bfloat16) - 8
                torch.addcmul(offsets, centred, scales, out=wide[:, :, place, half])
        return wide.view(inputs, outputs)

    @staticmethod
    def group_for(codes: Codes, narrow: NarrowWeights) -> int:
        """The kernel's group size for a weight; 0 if it has none."""
        rows, columns = codes.values.shape
        is_fitting = (
            narrow == NarrowWeights.NARROW
            and codes.bits == 4
            and not codes.is_float4
            and codes.groups is None
            and rows % INT4_ROWS == 0
            and codes.values.device.type == "cpu"
        )
        shared = columns if codes.scales.shape[-1] == 1 else codes.group_size
        sizes = [size for size in INT4_GROUPS if shared % size == 0 == columns % size]
        return sizes[0] if is_fitting and sizes else 0


NarrowProduct = Int8Product | Int4Product | Float8Product


def choose_narrow(codes: Codes, narrow: NarrowWeights) -> NarrowProduct | None:
    """The product with a weight of a model in bf16 that stays as it is stored; None if it is
    better wide, or has no kernel here."""
    if narrow == NarrowWeights.WIDE or codes.values.dim() != 2 or codes.values.numel() == 0:
        return None
    if codes.values.dtype == torch.float8_e4m3fn:
        return choose_float8(codes)
    if Int8Product.fits(codes, narrow):
        return Int8Product(codes)
    group_size = Int4Product.group_for(codes, narrow)
    return Int4Product(codes, group_size) if group_size else None


def _multiply_int8(codes: Tensor, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """fp32: exact sums of uint8 codes, 128 of which is 0, times the factors of rows."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(codes, 1.0, INT8_ZERO, values, scales, zeros, None, 1.0, 0),
        *(torch.float32, "none", [], ""),
    )
    return product


@cache
def _has_exact_int8() -> bool:
    """Whether sums of the largest products are exact: without VNNI, pairs saturate at 16 bits."""
    if not torch.cpu._is_vnni_supported():
        return False
    size = 64
    values = torch.full((size, size), INT8_MAX, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    codes = torch.full((2, size), 255, dtype=torch.uint8)
    zeros = torch.zeros(size, dtype=torch.int32)
    found = _multiply_int8(codes, packed, torch.ones(size), zeros)
    return bool((found == INT8_MAX * INT8_MAX * size).all())


def _pack_int4(values: Tensor) -> Tensor:
    """values: int8 of -8..7."""
    codes = values.to(torch.int32) + 8
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


@cache
def _int4_block() -> int:
    """Outputs that lie together on this CPU, the first half in the low bits; 0 if otherwise."""
    rows, columns = 2 * INT4_BLOCKS[0], 2
    values = (torch.arange(rows * columns).view(rows, columns) * 7 % 16 - 8).to(torch.int8)
    packed = _pack_int4(values)
    for block in INT4_BLOCKS:
        parts = packed.view(rows // block, columns, block // 2)
        codes = torch.cat((parts & 15, parts >> 4), dim=-1).transpose(1, 2).reshape(rows, columns)
        if torch.equal(codes.to(torch.int8) - 8, values):
            return block
    return 0
