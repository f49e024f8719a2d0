"""Weights of 4-bit floats of which neighbours share a power of two (MXFP4), made wide.

Source: OCP Microscaling Formats (MX) Specification 1.0: E2M1 elements, E8M0 scales. Knows nothing
of files.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# Of the codes without their sign, which is the fourth bit.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127


def widen_groups(packed: Tensor, exponents: Tensor) -> Tensor:
    """fp32[.., groups * n] of packed uint8[.., groups, n / 2] and exponents uint8[.., groups].

    A byte holds two neighbours, the first in its low half. Exact: every product is an fp32.
    """
    pairs, powers = _pairs(packed.device), _powers(packed.device)
    wide = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    scales = powers.index_select(0, exponents.reshape(-1).to(torch.int32))
    wide = wide.view(len(scales), -1).mul_(scales[:, None])
    return wide.view(*exponents.shape[:-1], -1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """int64[256]: the two fp32 of every byte side by side, to be fetched at once."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    codes = torch.arange(256)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), dim=-1)
    return pairs.view(torch.int64).view(-1).to(device)


@cache
def _powers(device: torch.device) -> Tensor:
    """fp32[256] of every exponent; the last code is not a number."""
    powers = [math.ldexp(1.0, code - EXPONENT_BIAS) for code in range(255)]
    return torch.tensor([*powers, math.nan], device=device)
