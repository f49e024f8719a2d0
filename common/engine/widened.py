"""Products of bfloat16 on a CPU that has none: part after part of a weight is made float32.

torch's own do 10 GFLOP/s there for any number of rows. Measured with one thread on an AMD EPYC with
AVX2 alone, 1024 x 4096 out of cache, speed over them for 1, 2, 4, 8, 16, 128 and 512 rows of
inputs: 0.7, 1.0, 1.3, 2.4, 3.7, 7.4, 7.7.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WIDENED_ELEMENTS = 1 << 18
"""Of a weight that are float32 at the same time: as many as stay in a core's cache."""
WIDENED_ROWS_MIN = 3
"""Inputs from which on that is faster than torch's own product, which widens in registers."""


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has what oneDNN's products of bfloat16 are made of."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_widened(inputs: Tensor) -> bool:
    """Whether torch's own products of such inputs are that slow."""
    is_bfloat16 = inputs.dtype == torch.bfloat16 and inputs.device.type == "cpu"
    return is_bfloat16 and not multiplies_bfloat16()


def linear(inputs: Tensor, rows: Tensor) -> Tensor:
    """`F.linear`, widened where that is faster."""
    return multiply_widened(inputs, rows, None) if is_widened(inputs) else F.linear(inputs, rows)


def multiply_widened(inputs: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [.., in] times rows [out, in], plus bias: [.., out]. Sums are rounded once."""
    output_count, size = rows.shape
    if inputs.numel() < WIDENED_ROWS_MIN * size:
        return F.linear(inputs, rows, bias)
    wide = inputs.reshape(-1, size).float()
    step = max(1, WIDENED_ELEMENTS // size)
    part = torch.empty((min(step, output_count), size))
    product = torch.empty((len(wide), output_count))
    for first in range(0, output_count, step):
        some = rows[first : first + step]
        some = part[: len(some)].copy_(some)
        torch.mm(wide, some.t(), out=product[:, first : first + step])
    if bias is not None:
        product += bias
    return product.to(inputs.dtype).view(*inputs.shape[:-1], output_count)
