"""Weights of 4-bit floats of which neighbours share a power of two (MXFP4), as codes.

Source: OCP Microscaling Formats (MX) Specification 1.0: E2M1 elements, E8M0 scales. Knows nothing
of files.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# Of the codes without their sign, which is the fourth bit: twice the value, a whole number.
DOUBLED_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
EXPONENT_BIAS = 127


def unpack_groups(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """(int8[.., groups * n], fp32 factors [.., groups]) of packed uint8[.., groups, n / 2] and
    exponents uint8[.., groups].

    A byte holds two neighbours, the first in its low half. Exact: values are doubled, factors
    halved.
    """
    pairs, powers = _pairs(packed.device), _powers(packed.device)
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.int8)
    scales = powers.index_select(0, exponents.reshape(-1).to(torch.int32))
    return values.view(*exponents.shape[:-1], -1), scales.view(exponents.shape)


@cache
def _pairs(device: torch.device) -> Tensor:
    """int16[256]: the two int8 of every byte side by side, to be fetched at once."""
    signed = [*DOUBLED_MAGNITUDES, *(-magnitude for magnitude in DOUBLED_MAGNITUDES)]
    values = torch.tensor(signed, dtype=torch.int8)
    codes = torch.arange(256)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), dim=-1)
    return pairs.view(torch.int16).view(-1).to(device)


@cache
def _powers(device: torch.device) -> Tensor:
    """fp32[256] of every exponent, halved; the last code is not a number."""
    powers = [math.ldexp(0.5, code - EXPONENT_BIAS) for code in range(255)]
    return torch.tensor([*powers, math.nan], device=device)
