"""The nucleus that is found without sorting is the one that sorting finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.sampling.noise import gumbel, row_keys
from common.engine.sampling.nucleus import drop_tails
from common.engine.sampling.sampler import Sampler
from common.request import SamplingParams

ROWS = 12


def kept(x: Tensor, top_p: Tensor) -> Tensor:
    """bool[R, vocab]"""
    changed = x.clone()
    drop_tails(changed, top_p)
    is_kept = changed > -torch.inf
    assert torch.equal(changed[is_kept], x[is_kept])
    return is_kept


def kept_by_sorting(x: Tensor, top_p: Tensor) -> Tensor:
    """A token stays if the probabilities of all that are larger do not reach top_p."""
    ordered, places = x.double().sort(dim=-1, descending=True)
    shares = ordered.softmax(dim=-1)
    before = shares.cumsum(dim=-1) - shares
    # Equal ones are decided together, by what is before the first of them.
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    before = before.masked_fill(~is_first, 0.0).cummax(dim=-1).values
    return torch.zeros_like(x, dtype=torch.bool).scatter_(1, places, before < top_p.double())


def random_rows(vocab: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((ROWS, vocab), generator=generator) * spread
    return x, torch.rand((ROWS, 1), generator=generator).clamp(0.001, 0.999)


@pytest.mark.parametrize(("vocab", "spread"), [(7, 1.0), (1000, 3.0), (1000, 0.01), (40_000, 1.0)])
@pytest.mark.parametrize("block", [1 << 22, 3000])
def test_a_nucleus_is_that_of_sorting(
    vocab: int, spread: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.sampling.nucleus.BLOCK_ELEMENTS", block)
    x, top_p = random_rows(vocab, spread, seed=vocab)
    x[0, : vocab // 2] = -torch.inf  # masked by a grammar
    x[1] = x[1].to(torch.bfloat16).float()  # as most models give them: many are equal
    x[2] = 0.0
    x[3, : vocab // 2] = -0.0
    expected, actual = kept_by_sorting(x, top_p), kept(x, top_p)
    # Roundings of the sums decide about a token at the border, or about those equal to it.
    for row in range(ROWS):
        differing = x[row, expected[row] != actual[row]]
        assert len(differing.unique()) <= 1, (row, len(differing))
    assert (expected != actual).any(dim=-1).sum() <= 1


def test_the_most_likely_token_always_stays() -> None:
    x, _ = random_rows(500, 2.0, seed=1)
    is_kept = kept(x, torch.full((ROWS, 1), 1e-20))
    assert torch.equal(is_kept.nonzero()[:, 1], x.argmax(dim=-1))


def test_nearly_all_of_a_flat_row_stays() -> None:
    x = torch.zeros((1, 5000))
    x[0, 0] = 1e-4
    x[0, 4999] = -1e-3
    assert kept(x, torch.full((1, 1), 1.0 - 2.0**-24)).sum() == 5000
    assert kept(x, torch.full((1, 1), 1.0 - 3e-4)).tolist() == [[True] * 4999 + [False]]


def test_rows_do_not_depend_on_each_other() -> None:
    x, top_p = random_rows(3000, 2.0, seed=2)
    together = kept(x, top_p)
    x[1] = torch.nan
    apart = [kept(x[row : row + 1], top_p[row : row + 1]) for row in range(ROWS)]
    assert all(torch.equal(together[row], apart[row][0]) for row in range(ROWS) if row != 1)
    beside = kept(x.nan_to_num(0.0), top_p)
    assert torch.equal(beside[2:], together[2:])


@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_tokens_are_those_that_candidates_would_give(min_p: float) -> None:
    count, vocab, top_p, temperature = 80, 2000, 0.8, 1.3
    x, _ = random_rows(vocab, 2.0, seed=3)
    logits = x[:1].repeat(count, 1)
    sampler = Sampler(vocab, [2], torch.device("cpu"))
    slots = np.arange(count)
    params = SamplingParams(
        max_new_tokens=4, seed=5, temperature=temperature, top_p=top_p, min_p=min_p
    )
    for slot in range(count):
        sampler.add(slot, params, torch.arange(3), 3)
    expected = sampler.sample(logits.clone(), slots, slots).token_ids
    logits /= temperature
    drop_tails(logits, torch.full((count, 1), top_p))
    floor = logits.amax(dim=-1, keepdim=True) + torch.tensor(min_p).log()
    logits.masked_fill_(logits < floor, -torch.inf)
    keys = row_keys(torch.full((count,), 5), torch.arange(count))
    noisy = logits + gumbel(keys, torch.arange(vocab, dtype=torch.int32))
    assert noisy.argmax(dim=-1).tolist() == expected
    assert len(set(expected)) > 30
