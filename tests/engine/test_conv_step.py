"""A step of the short convolution in one go, as kernels do it: its plain spelling against the
layer, and wrong ones that are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.cache.slots import SlotPlaces
from common.engine.layers import conv_step, norm, short_conv
from common.engine.layers.conv_step import (
    TOLERANCE,
    ConvChoice,
    ConvShape,
    ConvStep,
    Step,
    check_conv,
    step_plain,
)
from common.engine.layers.gated_norm_fla import GatedNormChoice, GatedNormShape, check_gated_norm
from common.engine.layers.norm import normalize
from common.engine.loader import load_model
from tests.engine.paged_decoding import Sequence, forward, make_pool

CPU = torch.device("cpu")
SHAPE = ConvShape(4, False, torch.bfloat16, CPU)


@pytest.mark.parametrize("recipe", ["qwen3_next", "qwen3_5", "kimi_linear", "ling_3"])
@torch.inference_mode()
def test_a_model_computes_the_same_by_steps_in_one_go(
    recipe: str, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are cut by head, and of rows that are not; three sequences, of which one starts
    in a pass of the others' steps."""
    count = 0

    def counted(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
        nonlocal count
        count += 1
        return step_plain(step, projected, places)

    results = []
    for choice in (ConvChoice(None, ""), ConvChoice(counted, "")):
        monkeypatch.setattr(short_conv, "choose_conv", lambda shape, found=choice: found)
        model = load_model(tiny_checkpoint(recipe))
        pool = make_pool(model, 9)
        sequences = [Sequence(list(range(3 + i, 23 + i)), [2 + 2 * i, 1 + 2 * i]) for i in range(3)]
        found = [forward(model, pool, [s.chunk(12) for s in sequences[:2]])]
        found.append(forward(model, pool, [s.chunk(1) for s in sequences[:2]]))
        assert (count > 0) == (choice.step is not None)
        steps = count
        found.append(forward(model, pool, [s.chunk(1) for s in sequences]))
        assert count == steps, "one of them begins with zeros"
        found.append(forward(model, pool, [s.chunk(1) for s in sequences]))
        results.append(found)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kernel_size", "has_bias"), [(4, False), (2, True)])
def test_the_plain_spelling_agrees_with_itself(
    kernel_size: int, has_bias: bool, dtype: torch.dtype
) -> None:
    assert check_conv(step_plain, ConvShape(kernel_size, has_bias, dtype, CPU)) == 0.0


def without_state(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    for states in places.states:
        states[places.read] = 0
    return step_plain(step, projected, places)


def back_to_where_it_was(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    return step_plain(step, projected, replace(places, write=places.read))


def newest_first(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    return step_plain(replace(step, weight=step.weight.flip(-1)), projected, places)


def parts_exchanged(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    first, second, *rest = step_plain(step, projected, places)
    return [second, first, *rest]


def nothing_kept(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    copies = tuple(states.clone() for states in places.states)
    return step_plain(step, projected, replace(places, states=copies))


@pytest.mark.parametrize(
    "mistake", [without_state, back_to_where_it_was, newest_first, parts_exchanged, nothing_kept]
)
def test_a_wrong_step_is_found_out_at_start(mistake: Step) -> None:
    assert not check_conv(mistake, SHAPE) <= TOLERANCE[SHAPE.dtype]


def test_without_a_card_the_reason_is_said() -> None:
    assert conv_step.choose_conv(SHAPE) == ConvChoice(None, "the path of cpu")
    choice = conv_step.choose_conv(replace(SHAPE, device=torch.device("cuda")))
    assert choice.step is None and choice.reason


def gated(hidden: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = normalize(hidden.float(), epsilon) * weight.float()
    return (wide * torch.nn.functional.silu(gate.float())).to(hidden.dtype)


def test_gated_norms_are_compared_with_the_plain_spelling(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = GatedNormShape(64, torch.bfloat16, CPU)
    assert check_gated_norm(gated, shape) <= 2**-8
    assert not check_gated_norm(lambda x, g, w, e: gated(g, x, w, e), shape) <= 3e-2
    assert not check_gated_norm(lambda x, g, w, e: gated(x, g, w + 1, e), shape) <= 3e-2
    results = []
    for kernel in (None, gated):
        choice = GatedNormChoice(kernel, "")
        monkeypatch.setattr(norm, "choose_gated_norm", lambda _, found=choice: found)
        model = load_model(tiny_checkpoint("qwen3_next"))
        pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
        results.append([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
