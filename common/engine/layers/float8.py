"""Products of float8 weights with inputs that are rounded to float8, by torch's scaled products.

Their kernels are for CUDA: a factor for each row takes compute capability 8.9 or later, blocks of
128 x 128 take 9.0 and cuBLAS of CUDA 12.9. Which of them work on a device is tried before the first
weight is left narrow, against the same product spelled out.
Source: `_scaled_mm` of torch 2.9 to 2.13, its checks (`torch._meta_registrations`) and its tests.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.kernel_trial import give_memory_back, largest_difference, try_or_torch

log = logging.getLogger(__name__)

DEVICE_TYPES = ("cuda",)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
BLOCK = 128
ALIGNMENT = 16
"""Outputs and inputs come in multiples of this."""
BLOCK_COLUMNS = 4 * BLOCK
"""Inputs come in multiples of this, where factors are of blocks: for other sizes, releases of torch
disagree about how far the factors of two rows of blocks lie apart."""
BLOCK_ROWS = 4
"""Rows of inputs come in multiples of this, where factors are of blocks."""
TOLERANCE = 2.0**-7
"""The sums of both are rounded to bf16 once, and are of exact products."""
_ROW_COUNTS = (1, 3, 17, 130)


class Float8Product:
    """W [N, K] float8 with a factor for each row, or each block of 128 x 128.

    scales: fp32[N, 1], or [N / 128, K / 128].
    """

    def __init__(self, values: Tensor, scales: Tensor, *, is_plain: bool = False) -> None:
        self.is_by_block = scales.shape[1] > 1 or len(scales) < len(values)
        self.name = name_of(self.is_by_block)
        self.nbytes = values.nbytes + scales.nbytes
        self._values = values.contiguous()
        self._scales = scales.contiguous()
        self._multiply = multiply_plain if is_plain else multiply

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        padding = -len(rows) % BLOCK_ROWS if self.is_by_block else 0
        if padding:
            rows = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
        codes, steps = round_to_float8(rows, BLOCK if self.is_by_block else rows.shape[1])
        product = self._multiply(codes, steps, self._values, self._scales, inputs.dtype)
        product = product[: len(product) - padding].view(*inputs.shape[:-1], -1)
        return product if bias is None else product + bias


def round_to_float8(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(float8[T, K], fp32 factors [T, K / size]): each run of `size` by its largest element."""
    groups = rows.float().unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    largest = groups.abs().amax(dim=-1, keepdim=True)
    steps = largest.clamp_(min=torch.finfo(torch.float32).tiny * FLOAT8_MAX) / FLOAT8_MAX
    return (groups / steps).flatten(-2).to(FLOAT8), steps[..., 0]


def multiply(
    codes: Tensor, steps: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """[T, N] of codes [T, K] and values [N, K]; steps, scales: fp32, of rows or of blocks.

    The kernel tells them apart by their shapes. It wants the factors of blocks transposed: those of
    one column of blocks beside each other, as the values of W^T are.
    """
    if steps.shape[1] > 1 or len(scales) < len(values):
        steps, scales = steps.t().contiguous().t(), scales.t()
    else:
        scales = scales.view(1, -1)
    product: Tensor = torch._scaled_mm(codes, values.t(), steps, scales, out_dtype=dtype)
    return product


def multiply_plain(
    codes: Tensor, steps: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `multiply`, spelled out."""
    size = codes.shape[1] // steps.shape[1]
    rows = -(-len(values) // len(scales))
    wide = values.float() * scales.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(
        size, 1
    )
    inputs = codes.float() * steps.repeat_interleave(size, 1)
    return (inputs @ wide.t()).to(dtype)


def choose_float8(codes: Codes) -> Float8Product | None:
    """None where no kernel multiplies by such a weight, or none works on its device."""
    rows, columns = codes.values.shape
    device = codes.values.device
    if not codes.rounds_inputs or codes.groups is not None or device.type not in DEVICE_TYPES:
        return None
    if rows % ALIGNMENT or columns % ALIGNMENT:
        return None
    scales = codes.scales
    if scales.shape[1] > 1:
        blocks = blocks_of(codes)
        if blocks is None:
            return None
        scales = blocks
    is_by_block = scales.shape[1] > 1
    return Float8Product(codes.values, scales) if works(device, is_by_block) else None


def blocks_of(codes: Codes) -> Tensor | None:
    """fp32[N / 128, K / 128]: the factors of blocks; None if rows in one differ."""
    rows, columns = codes.values.shape
    if codes.group_size != BLOCK or columns % BLOCK_COLUMNS or rows % BLOCK:
        return None
    blocks = codes.scales.view(rows // BLOCK, BLOCK, -1)
    return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None


def name_of(is_by_block: bool) -> str:
    return f"float8 by {'blocks of 128' if is_by_block else 'rows'} and tokens, aten::_scaled_mm"


@cache
def works(device: torch.device, is_by_block: bool) -> bool:
    """Whether the kernel runs on a device and agrees with what it stands for."""

    def build_and_check() -> tuple[Float8Product, float]:
        kernel = product(is_plain=False)
        return kernel, check(kernel, product(is_plain=True))

    def product(*, is_plain: bool) -> Float8Product:
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(2 * BLOCK, 4 * BLOCK, generator=generator).to(FLOAT8).to(device)
        shape = (2, 4) if is_by_block else (2 * BLOCK, 1)
        scales = torch.rand(shape, generator=generator).to(device) * 0.05
        return Float8Product(values, scales, is_plain=is_plain)

    name = name_of(is_by_block)
    kernel, reason = try_or_torch(name, build_and_check, TOLERANCE)
    give_memory_back(device)
    if kernel is None:
        log.warning("weights of %s are made wide: %s", name, reason)
    return kernel is not None


@torch.inference_mode()
def check(kernel: Float8Product, plain: Float8Product) -> float:
    """The largest difference between the two; inf where shapes differ."""
    columns, device = plain._values.shape[1], plain._values.device
    generator, worst = torch.Generator().manual_seed(2), 0.0
    for row_count in _ROW_COUNTS:
        rows = torch.randn(row_count, columns, generator=generator)
        inputs = rows.to(torch.bfloat16).to(device)
        expected, found = plain(inputs, None), kernel(inputs, None)
        difference = largest_difference(expected, found)
        if not difference < float("inf"):
            return difference
        worst = max(worst, difference)
    return worst
