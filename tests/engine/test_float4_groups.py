"""4-bit floats made wide: every code, every exponent, and slices that cut groups."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.engine.checkpoint.codes import Codes
from common.engine.checkpoint.files import TensorEntry
from common.engine.checkpoint.float4_groups import unpack_groups
from common.engine.checkpoint.scaled_tensors import Role, check_parts, read_stored
from common.engine.config.weight_format import Float4Groups
from common.errors import ConfigError


def decode(code: int) -> float:
    """Sign, two bits of exponent, one of mantissa, written out."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def widen_groups(packed: Tensor, exponents: Tensor) -> Tensor:
    size = 2 * packed.shape[-1]
    return Codes(*unpack_groups(packed, exponents), None, 4, size, is_float4=True).widen()


def draw(*shape: int, low: int = 0, high: int = 256, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def test_every_byte_holds_two_elements_the_first_in_its_low_half() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    wide = widen_groups(packed, torch.full((16,), 127, dtype=torch.uint8))
    expected = [decode(code) for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert wide.tolist() == expected


def test_every_exponent_is_an_exact_power_of_two() -> None:
    """The last one is not a number."""
    exponents = torch.arange(256, dtype=torch.uint8)
    wide = widen_groups(torch.full((256, 1), 0x22, dtype=torch.uint8), exponents)
    assert wide[:510].tolist() == [math.ldexp(1.0, e - 127) for e in range(255) for _ in range(2)]
    assert wide[510:].isnan().all()


def test_random_experts_equal_the_conversion_of_transformers() -> None:
    packed, exponents = draw(3, 10, 4, 16), draw(3, 10, 4, low=100, high=140, seed=2)
    expected = convert_moe_packed_tensors(packed, exponents, dtype=torch.float32)
    assert torch.equal(widen_groups(packed, exponents).transpose(1, 2), expected)


@pytest.mark.parametrize(
    "take",
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 2), slice(2, 7), slice(0, 32)),
        (slice(0, 3), slice(None), slice(16, 48)),
        (slice(None), slice(9, 10), slice(33, 128)),
        (slice(None), slice(None), slice(127, 128)),
    ],
)
def test_a_slice_is_that_of_the_whole_tensor(take: tuple[slice, ...]) -> None:
    shape = (3, 10, 128)
    stored = {"values": draw(3, 10, 4, 16), "scales": draw(3, 10, 4, low=120, high=134, seed=2)}
    read_count = 0

    def read(entry: TensorEntry, part: tuple[slice, ...]) -> Tensor:
        nonlocal read_count
        read_count += stored[entry.name][part].numel()
        return stored[entry.name][part]

    values, scales = (
        TensorEntry(name, Path("file"), "U8", tuple(tensor.shape), 0, 0)
        for name, tensor in stored.items()
    )
    parts = {Role.VALUES: values, Role.SCALES: scales}
    found = read_stored(read, parts, shape, take, Float4Groups(), torch.device("cpu"))
    assert torch.equal(found.widen(), widen_groups(stored["values"], stored["scales"])[take])
    group_count = -(-(take[2].stop or 128) // 32) - (take[2].start or 0) // 32
    assert read_count == found.values[..., 0].numel() * group_count * 17, (
        "only what is needed is read"
    )


def test_rows_that_groups_do_not_fill_are_named() -> None:
    values, scales = (TensorEntry(n, Path("file"), "U8", (4, 2), 0, 0) for n in ("v", "s"))
    with pytest.raises(ConfigError, match=r"file: tensor v has rows of 80 elements: .* of 32"):
        check_parts({Role.VALUES: values, Role.SCALES: scales}, (4, 80), Float4Groups())
