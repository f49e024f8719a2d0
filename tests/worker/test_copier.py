"""Gather, scatter and conversion of pieces: the quick ways against the slow ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.cache.cast import CACHE_DTYPES, cast
from common.planner.staging import Conversion, LinearCopy
from common.transport.copies import convert_float8, copy_runs
from common.transport.loader import load_ucx
from common.worker.staging.copier import Copier, copy_by_index

load_ucx("auto")

FLOAT8 = "float8_e4m3fn"


def every_value(dtype: str) -> Tensor:
    """All of a type with up to 16 bits; of float32, what lies near float8's borders and noise."""
    if dtype == FLOAT8:
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    if dtype == "bfloat16":
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()]
    middles = (exact[:, None] + exact[None]).reshape(-1) / 2
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator, dtype=torch.int64)
    noise = bits.to(torch.int32).view(torch.float32)
    near = torch.cat([middles.nextafter(torch.tensor(sign)) for sign in (-1e30, 1e30)])
    return torch.cat([exact, middles, near, noise])


@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_narrowing", [True, False])
def test_the_native_conversion_is_torchs(wide: str, is_narrowing: bool) -> None:
    values = every_value(wide if is_narrowing else FLOAT8)
    to = CACHE_DTYPES[FLOAT8 if is_narrowing else wide]
    expected = cast(values, to)
    out = torch.empty(len(values), dtype=to)
    zero, count = np.zeros(1, dtype=np.int64), np.array([len(values)], dtype=np.int64)
    raw_out, raw_values = out.view(torch.uint8).numpy(), values.view(torch.uint8).numpy()
    convert_float8(raw_out, raw_values, zero, zero, count, wide, is_narrowing)
    is_nan = values.float().isnan()
    assert out.float().isnan().equal(is_nan)
    assert torch.equal(out[~is_nan].view(torch.uint8), expected[~is_nan].view(torch.uint8))


@pytest.mark.parametrize(
    ("target_offset", "source_offset", "count", "wide"),
    [
        (0, 0, 9, "bfloat16"),
        (1, 0, 8, "bfloat16"),
        (0, 2, 8, "bfloat16"),
        (0, 1, 2, "bfloat16"),
        (-1, 0, 2, "bfloat16"),
        (0, -2, 2, "bfloat16"),
        (0, 0, -1, "bfloat16"),
        (0, 2, 1, "float32"),
        (0, 0, 5, "float32"),
        (0, 0, 1, "float16"),
    ],
)
def test_runs_that_leave_their_buffers_are_refused(
    target_offset: int, source_offset: int, count: int, wide: str
) -> None:
    numbers = (np.array([n], dtype=np.int64) for n in (target_offset, source_offset, count))
    with pytest.raises(ValueError, match=r"leaves its buffers|must be bfloat16 or float32"):
        convert_float8(np.zeros(8, np.uint8), np.zeros(16, np.uint8), *numbers, wide, True)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 8), st.randoms())
def test_copies_by_index_are_the_native_copies(
    sizes: list[int], grain: int, random: object
) -> None:
    """The way of CUDA, which the CPU can go as well."""
    rng = np.random.default_rng(sum(sizes) * grain)
    nbytes = np.array(sizes, dtype=np.int64) * grain
    order = rng.permutation(len(sizes))
    source_offset = np.cumsum(nbytes) - nbytes
    target_offset = np.empty_like(nbytes)
    target_offset[order] = np.cumsum(nbytes[order] + grain) - nbytes[order]
    total = int(nbytes.sum()) + grain * (len(sizes) + 1)
    source = torch.from_numpy(rng.integers(0, 256, total, dtype=np.uint8))
    native, indexed = torch.zeros(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    copy_runs(native.numpy(), source.numpy(), target_offset, source_offset, nbytes)
    copy_by_index(indexed, source, (target_offset, source_offset, nbytes))
    assert torch.equal(native, indexed)


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float32", FLOAT8, FLOAT8),
        ("bfloat16", FLOAT8, FLOAT8),
        (FLOAT8, "bfloat16", FLOAT8),
        (FLOAT8, "float32", FLOAT8),
        ("float16", "float32", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("is_native", [True, False])
def test_a_piece_is_converted_once_on_its_way(
    source: str, target: str, wire: str, is_native: bool
) -> None:
    count, padding = 96, 32
    values = torch.randn(count, generator=torch.Generator().manual_seed(2)) * 100
    held = cast(values, CACHE_DTYPES[source])
    convert = convert_float8 if is_native else None
    pages = held.view(torch.uint8).clone()
    landed = torch.zeros(count * CACHE_DTYPES[target].itemsize + padding, dtype=torch.uint8)
    slot = torch.full((4096,), 7, dtype=torch.uint8)
    conversion = Conversion(source, target, wire)

    def thirds(dtype: str, shift: int) -> LinearCopy:
        """The piece's three parts in another order in the pages."""
        part = count // 3 * CACHE_DTYPES[dtype].itemsize
        parts = np.arange(3, dtype=np.int64) * part
        return LinearCopy(0, np.roll(parts, shift), parts, np.full(3, part, dtype=np.int64))

    Copier([pages], copy_runs, convert).gather(thirds(source, 1), conversion, slot)
    used = count * CACHE_DTYPES[wire].itemsize
    assert bool((slot[used:] == 7).all())
    Copier([landed], copy_runs, convert).scatter(thirds(target, 1), conversion, slot)
    expected = cast(cast(held, CACHE_DTYPES[wire]), CACHE_DTYPES[target])
    assert torch.equal(landed[:-padding], expected.view(torch.uint8))
    assert not landed[-padding:].any()
