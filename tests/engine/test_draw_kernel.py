"""Draws by one kernel: by its definition here, by Triton in `tests/kernel_packages`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.sampling import sampler
from common.engine.sampling.choose_draw import (
    TOLERANCE,
    DrawChoice,
    Steering,
    check_draw,
    choose_draw,
)
from common.engine.sampling.noise import gumbel, row_keys
from common.engine.sampling.sampler import Sampler
from common.request import SamplingParams
from tests.engine.sampled_steps import draws

CPU = torch.device("cpu")
VOCAB_SIZE = 300
Draw = Callable[[Tensor, Steering | None], Tensor]


def drawn(logits: Tensor, steering: Steering | None) -> Tensor:
    """As `triton_draw.draw_rows` is documented."""
    scores = logits.clone()
    if steering is not None:
        seeds, positions, temperatures = steering
        ids = torch.arange(logits.shape[1], dtype=torch.int32)
        noise = gumbel(row_keys(seeds, positions), ids)
        is_drawn = (temperatures > 0)[:, None]
        scores = torch.where(is_drawn, scores / temperatures[:, None] + noise, scores)
    is_usable = torch.isfinite(logits).all(dim=1)
    tokens = scores.nan_to_num(-math.inf, math.inf, -math.inf).argmax(dim=1)
    return torch.stack((tokens, is_usable.long(), (logits > -math.inf).any(dim=1).long()))


def noise_of_the_token_before(logits: Tensor, steering: Steering | None) -> Tensor:
    if steering is None:
        return drawn(logits, None)
    seeds, positions, temperatures = steering
    return drawn(logits, (seeds, positions - 1, temperatures))


def as_warm_as_one(logits: Tensor, steering: Steering | None) -> Tensor:
    if steering is None:
        return drawn(logits, None)
    seeds, positions, temperatures = steering
    return drawn(logits, (seeds, positions, temperatures.clamp(max=1.0)))


def last_of_equal_ones(logits: Tensor, steering: Steering | None) -> Tensor:
    found = drawn(logits, steering)
    found[0] = logits.shape[1] - 1 - drawn(logits.flip(1), steering)[0]
    return found


def all_are_finite(logits: Tensor, steering: Steering | None) -> Tensor:
    found = drawn(logits, steering)
    found[1] = 1
    return found


def none_is_open(logits: Tensor, steering: Steering | None) -> Tensor:
    found = drawn(logits, steering)
    found[2] = 0
    return found


def test_tokens_by_definition_are_trusted() -> None:
    assert check_draw(drawn, VOCAB_SIZE, CPU) <= TOLERANCE


@pytest.mark.parametrize(
    "mistake",
    [
        noise_of_the_token_before,
        as_warm_as_one,
        last_of_equal_ones,
        all_are_finite,
        none_is_open,
    ],
)
def test_a_wrong_kernel_is_found_out_at_start(mistake: Draw) -> None:
    assert not check_draw(mistake, VOCAB_SIZE, CPU) <= TOLERANCE


def test_torch_draws_where_there_is_no_kernel() -> None:
    assert choose_draw(VOCAB_SIZE, CPU) == DrawChoice(None, "the path of cpu")
    choice = choose_draw(VOCAB_SIZE, torch.device("cuda"))
    assert choice.kernel is None and "triton" in choice.reason


def params(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_new_tokens": 9, "seed": 1, "temperature": 0.9, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


KINDS = (
    params(temperature=0.0),
    params(seed=-2),
    params(temperature=0.2, return_logprob=True, top_logprobs_num=2),
    params(top_k=5, top_p=0.9),
    params(top_p=0.8),
    params(min_p=0.2),
    params(logit_bias={7: 50.0}),
    params(temperature=0.0, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -math.inf)),
    params(min_new_tokens=9),
    params(frequency_penalty=0.5, repetition_penalty=1.2),
)


def test_a_sampler_with_a_kernel_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, len(KINDS), VOCAB_SIZE, generator=generator) * 3.0
    logits[2, 1, 5], logits[2, 6, 5], logits[4, 0] = math.inf, math.nan, -math.inf
    plain = draws(KINDS, logits)
    assert any(sampled.failed for sampled in plain)
    called: list[bool] = []

    def kernel(of_step: Tensor, steering: Steering | None) -> Tensor:
        called.append(steering is not None)
        return drawn(of_step, steering)

    monkeypatch.setattr(sampler, "choose_draw", lambda size, device: DrawChoice(kernel, ""))
    assert draws(KINDS, logits) == plain
    assert called == [True] * len(logits)


def test_greedy_rows_cost_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Steering | None] = []

    def kernel(of_step: Tensor, steering: Steering | None) -> Tensor:
        found.append(steering)
        return drawn(of_step, steering)

    monkeypatch.setattr(sampler, "choose_draw", lambda size, device: DrawChoice(kernel, ""))
    drawing = Sampler(VOCAB_SIZE, [2], CPU)
    drawing.add(0, KINDS[0], torch.tensor([5, 6]), 2)
    drawing.sample(torch.randn(1, VOCAB_SIZE), np.array([0]), np.array([2]))
    assert found == [None]
