"""Weights that stay as they are stored: products, models and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.checkpoint.codes import Codes
from common.engine.distributed import ParallelContext
from common.engine.layers import narrow as narrow_module
from common.engine.layers.linear import RowLinear
from common.engine.layers.matrix import Matrix
from common.engine.layers.narrow import (
    INT4_WIDENED_ROWS,
    INT8_ELEMENTS_MIN,
    Int4Product,
    Int8Product,
    NarrowWeights,
    choose_narrow,
)
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from tests.engine.paged_decoding import Sequence, forward, greedy, make_pool, shuffled_pages
from tests.engine.stored_formats import FORMATS, write_twins
from tests.engine.tiny_checkpoints import random_prompt

Checkpoints = Callable[[str], Path]
ROUNDING = 2.0**-8
"""The largest relative error of one rounding to bf16."""

has_int8 = pytest.mark.skipif(
    not narrow_module._has_exact_int8(), reason="this CPU has no exact products of int8"
)


def draw_int8(rows: int, columns: int, seed: int = 1) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    scales = torch.rand(rows, 1, generator=generator) * 0.01
    return Codes(values, scales, None, 8, columns, rounds_inputs=True)


def draw_int4(rows: int, columns: int, group_size: int, *, has_zeros: bool = True) -> Codes:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)
    shape = (rows, -(-columns // group_size))
    scales = torch.rand(shape, generator=generator) * 0.01
    zeros = torch.randint(-8, 8, shape, generator=generator).float() if has_zeros else None
    return Codes(values, scales, zeros, 4, group_size)


@has_int8
@pytest.mark.parametrize("shape", [(37, 33), (96, 64), (1, 64), (256, 1056)])
@torch.inference_mode()
def test_int8_products_are_those_of_inputs_rounded_token_by_token(shape: tuple[int, int]) -> None:
    codes = draw_int8(*shape)
    product = choose_narrow(codes, NarrowWeights.NARROW)
    assert isinstance(product, Int8Product)
    bias = torch.randn(shape[0]).bfloat16()
    for token_count in (0, 1, 5, 130):
        inputs = torch.randn(token_count, shape[1]).bfloat16()
        steps = inputs.double().abs().amax(-1, keepdim=True) / 127
        rounded = (inputs.float() / steps.float()).round().double()
        exact = rounded @ codes.values.double().t() * codes.scales[:, 0].double() * steps
        for added in (None, bias):
            expected = exact if added is None else exact + added.double()
            found = product(inputs, added).double()
            # One rounding of the result, and some of fp32 before it.
            limit = 1.01 * ROUNDING * expected.abs() + 1e-5 * exact.abs()
            assert ((found - expected).abs() <= limit).all(), token_count


@has_int8
@torch.inference_mode()
def test_inputs_of_zeros_and_of_no_numbers_stay_what_they_are() -> None:
    product = choose_narrow(draw_int8(16, 64), NarrowWeights.NARROW)
    assert product is not None
    inputs = torch.zeros(2, 64).bfloat16()
    inputs[1, 3] = torch.nan
    found = product(inputs, None)
    assert (found[0] == 0).all() and found[1].isnan().all()


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(48, 96, 32), (64, 64, 64), (128, 512, 128), (16, 256, 256), (192, 384, 384), (64, 1024, 512)],
)
@torch.inference_mode()
def test_int4_products_are_close_to_wide_ones(
    rows: int, columns: int, group_size: int, has_zeros: bool
) -> None:
    """Wide, every weight is rounded to bf16; narrow, every factor and every offset is."""
    codes = draw_int4(rows, columns, group_size, has_zeros=has_zeros)
    product = choose_narrow(codes, NarrowWeights.NARROW)
    assert isinstance(product, Int4Product)
    wide = codes.widen().double()
    scales, zeros = (
        codes._by_column(t).double() for t in (codes.scales, torch.ones_like(codes.scales) * 8)
    )
    parts = (codes.values.double().abs() + (zeros if has_zeros else 0)) * scales + wide.abs()
    for token_count in (1, 7, INT4_WIDENED_ROWS - 1, INT4_WIDENED_ROWS + 3):
        inputs = torch.randn(token_count, columns).bfloat16()
        expected = inputs.double() @ wide.t()
        limit = 1.01 * ROUNDING * (inputs.double().abs() @ parts.t() + expected.abs())
        assert ((product(inputs, None).double() - expected).abs() <= limit).all(), token_count


@has_int8
@pytest.mark.parametrize("bits", [4, 8])
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rest_of_its_batch(bits: int) -> None:
    codes = draw_int8(128, 256) if bits == 8 else draw_int4(128, 256, 64)
    product = choose_narrow(codes, NarrowWeights.NARROW)
    assert product is not None
    inputs = torch.randn(33, 256).bfloat16()
    together = product(inputs, None)
    for index in range(len(inputs)):
        assert torch.equal(product(inputs[index : index + 1], None)[0], together[index])


def is_kept(codes: list[Codes], narrow: NarrowWeights, dtype: torch.dtype = torch.bfloat16) -> bool:
    rows = sum(len(part.values) for part in codes)
    return Matrix(torch.empty(rows, codes[0].values.shape[1], dtype=dtype), narrow).keep(codes)


@has_int8
@torch.inference_mode()
def test_what_stays_narrow_is_what_a_kernel_multiplies_by() -> None:
    small, large = draw_int8(64, 64), draw_int8(1024, INT8_ELEMENTS_MIN // 1024)
    int4 = draw_int4(64, 64, 32)
    auto, narrow, wide = NarrowWeights.AUTO, NarrowWeights.NARROW, NarrowWeights.WIDE
    assert [is_kept([codes], auto) for codes in (small, large, int4)] == [False, True, False]
    assert [is_kept([codes], narrow) for codes in (small, large, int4)] == [True, True, True]
    assert [is_kept([codes], wide) for codes in (small, large, int4)] == [False, False, False]
    assert not is_kept([small], narrow, torch.float32)
    assert is_kept([small, draw_int8(32, 64)], narrow)
    assert not is_kept([small, int4], narrow), "parts of two forms"
    assert not is_kept([draw_int4(64, 64, 16)], narrow), "groups that the kernel has not"
    assert not is_kept([draw_int4(24, 64, 32)], narrow), "outputs that it does not take"
    embedding = Matrix(torch.empty(64, 64).bfloat16(), narrow)
    embedding.keeps_rows = True
    assert not embedding.keep([small]), "rows that an embedding reads"
    head = Matrix(torch.empty(65, 64).bfloat16(), narrow)
    assert not head.keep([small]), "a row of padding"


@has_int8
@torch.inference_mode()
def test_a_weight_that_stays_narrow_never_has_wide_memory() -> None:
    codes = draw_int8(64, 64)
    rows = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    kept, wide = (Matrix(rows, NarrowWeights.NARROW, torch.device("cpu")) for _ in range(2))
    assert kept.keep([codes])
    with pytest.raises(AssertionError, match="given up"):
        kept.room(rows)
    target = wide.room(rows[16:32])
    target.fill_(3.0)
    assert wide.rows.device.type == "cpu" and (wide.rows[16:32] == 3.0).all()
    assert wide.room(wide.rows[:4]).data_ptr() == wide.rows.data_ptr()


def load(path: Path, narrow: NarrowWeights, rank: tuple[int, int] = (0, 1)) -> CausalLm:
    parallel = ParallelContext(*rank)
    return load_model(path, dtype="bfloat16", packs=True, narrow=narrow, parallel=parallel)


KEPT = {
    "int8": "int8 by rows and tokens, onednn::qlinear_pointwise: 12 weights",
    "int4 groups": "int4 by groups of 32, aten::_weight_int4pack_mm_for_cpu: 12 weights",
    "int4 groups with zeros": "int4 by groups of 32, aten::_weight_int4pack_mm_for_cpu: 12 weights",
    "awq": "int4 by groups of 32, aten::_weight_int4pack_mm_for_cpu: 12 weights",
    "gptq": "int4 by groups of 32, aten::_weight_int4pack_mm_for_cpu: 12 weights",
}


@has_int8
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
@torch.inference_mode()
def test_a_narrow_model_computes_what_a_wide_one_does(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Logits within what 8 bits of the inputs, or bf16 factors, change; and the same tokens."""
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS[name])
    wide, narrow = load(path, NarrowWeights.WIDE), load(path, NarrowWeights.NARROW)
    assert KEPT[name] in narrow.describe()["weights"]
    assert "int4" not in wide.describe()["weights"] and "int8" not in wide.describe()["weights"]
    prompt = random_prompt(37, 1)
    found, expected = (
        forward(model, make_pool(model, 8), [Sequence(prompt, shuffled_pages(8, 1)).chunk(37)])
        for model in (narrow, wide)
    )
    # Each of 12 products adds an error of about 1 / 127 / sqrt(12) of the largest input, or 2^-8.
    relative = (found - expected).norm() / expected.norm()
    assert relative < (0.05 if name == "int8" else 0.02), relative
    outputs = [
        greedy(m, make_pool(m, 8), Sequence(prompt, shuffled_pages(8, 1)), [20, 17], 12)
        for m in (narrow, wide)
    ]
    assert outputs[0] == outputs[1]


@has_int8
@pytest.mark.parametrize("name", ["int8", "gptq"])
@torch.inference_mode()
def test_ranks_keep_their_parts_of_a_weight(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Inputs of 64 are cut in halves, at a border of groups; inputs of 96 inside one."""
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS[name])
    whole = load(path, NarrowWeights.WIDE)
    ranks = [load(path, NarrowWeights.NARROW, (rank, 2)) for rank in range(2)]
    kept = "12 weights" if name == "int8" else "9 weights"
    for rank in ranks:
        assert KEPT[name].replace("12 weights", kept) in rank.describe()["weights"]
    inputs = torch.randn(5, 64).bfloat16()
    expected = output_of(whole)(inputs)
    parts = [output_of(rank)._matrix(inputs[:, 32 * r :][:, :32]) for r, rank in enumerate(ranks)]
    error = (sum(parts) - expected).float().norm() / expected.float().norm()
    assert error < 0.02


def output_of(model: CausalLm) -> RowLinear:
    """The last product of the first layer's attention."""
    layer = model.layers[0]
    found = [value for value in vars(layer.attention).values() if isinstance(value, RowLinear)]
    (output,) = found
    return output
