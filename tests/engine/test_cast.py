"""Element types of a cache: what is cut, what is kept, and the quick way against torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from common.engine.cache.cast import CACHE_DTYPES, cast, raw
from common.layout.component import DTYPE_NBYTES
from common.layout.conversion import CONVERTIBLE


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_every_float8_widens_to_what_it_is(target: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    widened = cast(numbers.reshape(16, 16)[:, ::2], CACHE_DTYPES[target])
    expected = numbers.reshape(16, 16)[:, ::2].to(CACHE_DTYPES[target])
    torch.testing.assert_close(widened, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("target", "largest"), [("float8_e4m3fn", 448.0), ("float16", 65504.0)])
def test_what_is_too_large_is_cut_and_nan_stays(target: str, largest: float) -> None:
    for source in (torch.float32, torch.bfloat16):
        values = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan, 1.5], dtype=source)
        narrow = cast(values, CACHE_DTYPES[target]).float()
        assert narrow[:4].tolist() == [largest, -largest, largest, -largest]
        assert narrow[4].isnan() and narrow[5] == 1.5


@pytest.mark.parametrize("pair", sorted(map(sorted, CONVERTIBLE)), ids="-".join)
def test_what_was_narrowed_and_widened_again_stays_as_it_is(pair: list[str]) -> None:
    wide, narrow = sorted(pair, key=lambda dtype: -DTYPE_NBYTES[dtype])
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    once = cast(cast(values.to(CACHE_DTYPES[wide]), CACHE_DTYPES[narrow]), CACHE_DTYPES[wide])
    twice = cast(cast(once, CACHE_DTYPES[narrow]), CACHE_DTYPES[wide])
    assert torch.equal(once, twice)
    # Half a unit in the last place of 3 mantissa bits, the least of them; below 2^-6 they thin out.
    assert ((once.float() - values).abs() <= 2**-4 * values.abs() + 2**-9).all()


def test_nothing_is_copied_if_nothing_changes() -> None:
    values = torch.zeros(3, dtype=torch.bfloat16)
    assert cast(values, torch.bfloat16) is values
    assert raw(values) is values
    narrow = values.to(torch.float8_e4m3fn)
    assert raw(narrow).data_ptr() == narrow.data_ptr() and raw(narrow).dtype == torch.uint8


def test_every_type_of_a_cache_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in CACHE_DTYPES.items()} == DTYPE_NBYTES
