"""float8 products: the real operator where a CPU has it, and its contract where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.layers import float8
from common.engine.layers.float8 import FLOAT8, Float8Product, choose_float8
from common.engine.layers.narrow import NarrowWeights
from common.engine.loader import load_model
from tests.engine.paged_decoding import Sequence, forward, greedy, make_pool, shuffled_pages
from tests.engine.stored_formats import FORMATS, write_twins
from tests.engine.tiny_checkpoints import random_prompt

ROUNDING = 2.0**-8


def draw(rows: int, columns: int, *, by_block: bool) -> Codes:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=generator).to(FLOAT8)
    if not by_block:
        scales = torch.rand(rows, 1, generator=generator)
        return Codes(values, scales, None, 8, columns, rounds_inputs=True)
    blocks = torch.rand(-(-rows // 128), columns // 128, generator=generator)
    scales = blocks.repeat_interleave(128, 0)[:rows]
    return Codes(values, scales, None, 8, 128, rounds_inputs=True)


def multiply_by_contract(
    codes: Tensor, values: Tensor, steps: Tensor, scales: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """torch's operator as its checks for CUDA have it: by rows, or by blocks of 128."""
    (tokens, inputs), outputs = codes.shape, values.shape[1]
    assert codes.dtype == values.dtype == FLOAT8 and steps.dtype == scales.dtype == torch.float32
    assert codes.is_contiguous() and values.t().is_contiguous()
    assert inputs % 16 == outputs % 16 == 0
    if steps.shape == (tokens, 1):
        assert scales.shape == (1, outputs)
        assert steps.is_contiguous() and scales.is_contiguous()
        return ((codes.float() @ values.float()) * steps * scales).to(out_dtype)
    blocks = inputs // 128
    assert tokens % 4 == blocks % 4 == 0
    assert steps.shape == (tokens, blocks) and steps.stride() == (1, tokens)
    assert scales.shape == (blocks, outputs // 128) and scales.stride() == (1, blocks)
    product = torch.zeros(tokens, outputs)
    for block in range(blocks):
        part = slice(block * 128, (block + 1) * 128)
        factors = steps[:, block, None] * scales[block].repeat_interleave(128)[None]
        product += (codes[:, part].float() @ values[part].float()) * factors
    return product.to(out_dtype)


@pytest.fixture(params=[False, True], ids=["rows", "blocks"])
def by_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """As on a card; the operator is the real one of a CPU for rows, which has none for blocks."""
    is_by_block = bool(request.param)
    monkeypatch.setattr(float8, "DEVICE_TYPES", ("cpu",))
    if is_by_block:
        monkeypatch.setattr(torch, "_scaled_mm", multiply_by_contract)
    float8.works.cache_clear()
    yield is_by_block
    float8.works.cache_clear()


@torch.inference_mode()
def test_products_are_those_of_inputs_rounded_to_float8(by_block: bool) -> None:
    codes = draw(256, 1024, by_block=by_block)
    product = choose_float8(codes)
    assert product is not None and product.is_by_block == by_block
    assert product.name == float8.name_of(by_block)
    bias = torch.randn(256).bfloat16()
    size = 128 if by_block else 1024
    for token_count in (1, 3, 4, 130):
        inputs = torch.randn(token_count, 1024).bfloat16()
        runs = inputs.float().view(token_count, -1, size)
        steps = runs.abs().amax(-1, keepdim=True) / 448
        rounded = ((runs / steps).to(FLOAT8).double() * steps).view(token_count, -1)
        wide = codes.widen().double()
        sums = rounded.abs() @ wide.abs().t()
        for added in (None, bias):
            expected = rounded @ wide.t() + (0.0 if added is None else added.double())
            # Two roundings with a bias; sums of fp32 before.
            limit = 2.02 * ROUNDING * (rounded @ wide.t()).abs() + 1e-5 * sums
            limit += ROUNDING * expected.abs()
            difference = (product(inputs, added).double() - expected).abs()
            assert (difference <= limit).all(), token_count


@torch.inference_mode()
def test_inputs_of_zeros_and_of_no_numbers_stay_what_they_are(by_block: bool) -> None:
    product = choose_float8(draw(256, 512, by_block=by_block))
    assert product is not None
    inputs = torch.zeros(2, 512).bfloat16()
    inputs[1, 3] = torch.nan
    found = product(inputs, None)
    assert (found[0] == 0).all() and found[1].isnan().all()


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("token_count", [1, 5, 64])
def test_arguments_pass_the_checks_of_torch_for_a_card(by_block: bool, token_count: int) -> None:
    """On the meta device, torch checks as for CUDA."""
    values = torch.empty(256, 1024, dtype=FLOAT8, device="meta")
    scales = torch.empty((2, 8) if by_block else (256, 1), device="meta")
    inputs = torch.empty(token_count, 1024, dtype=torch.bfloat16, device="meta")
    found = Float8Product(values, scales)(inputs, None)
    assert (found.shape, found.dtype) == ((token_count, 256), torch.bfloat16)


def test_a_kernel_that_fails_or_differs_leaves_weights_wide(
    by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = draw(256, 512, by_block=by_block)

    def fail(*_: object, **__: object) -> Tensor:
        raise NotImplementedError("only supported for SM90")

    def differ(*arguments: Tensor, out_dtype: torch.dtype) -> Tensor:
        return multiply_by_contract(*arguments, out_dtype=out_dtype) * 1.02

    for broken in (fail, differ):
        float8.works.cache_clear()
        monkeypatch.setattr(torch, "_scaled_mm", broken)
        assert choose_float8(codes) is None


def test_what_no_kernel_takes_is_made_wide(by_block: bool) -> None:
    assert choose_float8(draw(256, 520, by_block=False)) is None
    assert choose_float8(draw(40, 512, by_block=False)) is None
    assert choose_float8(draw(320, 512, by_block=True)) is None, "a block that is cut short"
    assert choose_float8(draw(256, 640, by_block=True)) is None, "strides releases disagree about"
    shifted = draw(384, 512, by_block=True)
    parts = (shifted.values[64:320], shifted.scales[64:320])
    assert choose_float8(Codes(*parts, None, 8, 128, rounds_inputs=True)) is None
    plain = draw(256, 512, by_block=by_block)
    assert choose_float8(Codes(plain.values, plain.scales, None, 8, 512)) is None


def test_on_a_cpu_float8_is_made_wide() -> None:
    assert choose_float8(draw(256, 512, by_block=False)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 channel"])
@torch.inference_mode()
def test_a_narrow_model_computes_what_a_wide_one_does(
    name: str,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(float8, "DEVICE_TYPES", ("cpu",))
    float8.works.cache_clear()
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS[name])
    narrow, wide = (
        load_model(path, dtype="bfloat16", narrow=kind)
        for kind in (NarrowWeights.AUTO, NarrowWeights.WIDE)
    )
    is_announced = name == "fp8 tensor"
    kept = "float8 by rows and tokens, aten::_scaled_mm: 12 weights"
    assert (kept in narrow.describe()["weights"]) == is_announced
    prompt = random_prompt(37, 1)
    found, expected = (
        forward(model, make_pool(model, 8), [Sequence(prompt, shuffled_pages(8, 1)).chunk(37)])
        for model in (narrow, wide)
    )
    # Each of 12 products rounds its inputs to three bits behind the first one.
    assert (found - expected).norm() / expected.norm() < 0.15
    outputs = [
        greedy(m, make_pool(m, 8), Sequence(prompt, shuffled_pages(8, 1)), [20, 17], 8)
        for m in (narrow, wide)
    ]
    assert outputs[0] == outputs[1]
