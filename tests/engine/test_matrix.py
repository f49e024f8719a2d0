"""Weights that are packed once: the same products, and no second copy of what nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.layers.matrix import Matrix, PackedProduct
from common.engine.loader import load_model
from common.engine.widened import (
    WIDENED_ELEMENTS,
    WIDENED_ROWS_MIN,
    multiplies_bfloat16,
    multiply_widened,
)
from tests.engine.paged_decoding import Sequence, forward, make_pool

RECIPES = (
    *("qwen2_tied", "qwen3_moe", "gemma2", "gemma4_e", "deepseek_v3", "glm_dsa", "deepseek_v4"),
    *("gpt_oss", "qwen3_5", "kimi_linear", "ling_3", "nemotron_h", "falcon_h1"),
)
INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda inputs: inputs,
    "a part of rows": lambda inputs: torch.cat((inputs, inputs), dim=-1)[:, : inputs.shape[1]],
    "turned": lambda inputs: inputs.t().contiguous().t(),
}


SHAPES = [(96, 64), (37, 100), (1, 64), (512, 384)]
# Half of bfloat16's last place, at most.
ROUNDING = 2.0**-8


def products(
    shape: tuple[int, int], inputs: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """(rows, inputs, bias) to be multiplied."""
    torch.manual_seed(1)
    rows, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    for token_count in (0, 1, 3, 16, 129):
        given = inputs(torch.randn(token_count, shape[1]).bfloat16())
        yield from ((rows, given, added) for added in (None, bias))


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no products of bfloat16")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@torch.inference_mode()
def test_a_packed_weight_gives_the_same_products(
    shape: tuple[int, int], inputs: Callable[[Tensor], Tensor]
) -> None:
    for rows, given, bias in products(shape, inputs):
        packed = PackedProduct(rows.clone())
        assert torch.equal(packed(given, bias), F.linear(given, rows, bias)), len(given)


@pytest.mark.parametrize("shape", [*SHAPES, (3, WIDENED_ELEMENTS), (5, WIDENED_ELEMENTS // 2 - 1)])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@torch.inference_mode()
def test_a_widened_weight_gives_products_that_are_rounded_once(
    shape: tuple[int, int], inputs: Callable[[Tensor], Tensor]
) -> None:
    for rows, given, bias in products(shape, inputs):
        found = multiply_widened(given, rows, bias)
        if len(given) < WIDENED_ROWS_MIN:
            assert torch.equal(found, F.linear(given, rows, bias))
            continue
        exact = F.linear(given.double(), rows.double(), None if bias is None else bias.double())
        assert found.dtype == torch.bfloat16
        # Sums of float32 are off by a little of what was added up, which may be more than is left.
        atol = 1e-6 * shape[1]
        torch.testing.assert_close(found.double(), exact, rtol=1.01 * ROUNDING, atol=atol)


@torch.inference_mode()
def test_a_widened_weight_takes_inputs_of_any_shape() -> None:
    rows, given = torch.randn(8, 16).bfloat16(), torch.randn(2, 5, 16).bfloat16()
    found = multiply_widened(given, rows, None)
    torch.testing.assert_close(found, F.linear(given, rows))


@torch.inference_mode()
def test_rows_are_given_up_unless_somebody_reads_them() -> None:
    gone, kept = Matrix(torch.ones(8, 8).bfloat16()), Matrix(torch.ones(8, 8).bfloat16())
    kept.keeps_rows = True
    for each in (gone, kept):
        each.pack()
    assert torch.equal(kept.rows, torch.ones(8, 8).bfloat16())
    with pytest.raises(AssertionError, match="given up"):
        _ = gone.rows


@torch.inference_mode()
def test_weights_that_the_library_does_not_pack_stay_as_they_are() -> None:
    for rows in (torch.ones(4, 4, dtype=torch.float64), torch.ones(0, 4).bfloat16()):
        plain = Matrix(rows)
        plain.pack()
        assert plain.rows is rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_compute_the_same_with_packed_weights(
    tiny_checkpoint: Callable[[str], Path], recipe: str
) -> None:
    logits: list[list[Tensor]] = []
    for packs in (False, True):
        model = load_model(tiny_checkpoint(recipe), dtype="bfloat16", packs=packs)
        pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
        logits.append([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])
    for expected, found in zip(*logits, strict=True):
        if multiplies_bfloat16():
            assert torch.equal(found, expected)
        elif recipe != "glm_dsa":  # sums differ in their rounding; its choice of keys may flip
            assert torch.dist(found, expected) < 0.05 * torch.linalg.norm(expected)
