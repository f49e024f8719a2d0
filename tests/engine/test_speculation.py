"""Verified proposals against no proposals: tokens, log-probabilities, ends and failures.

Every family's cache is in `tests/families/test_speculation.py`; here is one, with all that a draw
can be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from common.engine.sampling.draw import NOT_FINITE
from common.engine.speculation.ngram import NgramProposer
from common.engine.speculation.proposer import Proposer
from common.grammar import GrammarCompiler
from common.request import Grammar, GrammarKind
from tests.engine.guided import GuidedProposer
from tests.engine.runner_driver import Driver, Tracked, greedy, random_prompt, track
from tests.engine.test_grammar import CHECKPOINT, EOS

VOCAB = 1280
OUTPUT_COUNT = 40
SAMPLINGS = [
    greedy(),
    greedy(temperature=0.9, seed=3),
    greedy(temperature=1.1, top_p=0.8, min_p=0.02, seed=4),
    greedy(temperature=0.8, top_k=20, presence_penalty=0.6, frequency_penalty=0.4, seed=5),
    greedy(repetition_penalty=1.3),
    greedy(logit_bias={7: 4.0, 9: -3.0}, temperature=1.0, seed=6),
    greedy(min_new_tokens=30, stop_token_ids=(5, 9, 11), temperature=1.2, seed=7),
    greedy(return_logprob=True, top_logprobs_num=3, token_ids_logprob=(4,), temperature=0.7),
    greedy(grammar=Grammar(GrammarKind.REGEX, "[a-f ]{12,80}"), temperature=1.0, seed=8),
    greedy(grammar=Grammar(GrammarKind.REGEX, "(ab|cd){4}"), min_new_tokens=3),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(str(CHECKPOINT), VOCAB, [EOS], thread_count=1)


@dataclass
class Outputs:
    """What sequences had without proposals. texts: of each, up to its end or OUTPUT_COUNT."""

    tracked: list[Tracked]
    texts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [one.tokens for one in self.tracked]


def begun() -> list[Tracked]:
    return [
        track(i, random_prompt(9 + i, VOCAB, i), sampling) for i, sampling in enumerate(SAMPLINGS)
    ]


def has_ended(one: Tracked) -> bool:
    stops = {EOS, *one.sampling.stop_token_ids}
    is_long = len(one.output) > one.sampling.min_new_tokens
    return len(one.output) >= OUTPUT_COUNT or (is_long and one.output[-1] in stops)


def run_all(driver: Driver, tracked: list[Tracked], drafts: int = 0) -> None:
    for one in tracked:
        driver.prefill(one)
    while going := [one for one in tracked if not has_ended(one)]:
        done = driver.step(decode=going, drafts=drafts)
        assert not done.failed


@pytest.fixture(scope="module")
def plain(grammars: GrammarCompiler) -> Outputs:
    tracked = begun()
    run_all(Driver(CHECKPOINT, grammars=grammars), tracked)
    return Outputs(tracked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "right"), [*((drafts, 0.7) for drafts in range(1, 9)), (4, 0.0), (4, 1.0)]
)
def test_outputs_are_those_without_proposals(
    plain: Outputs, grammars: GrammarCompiler, drafts: int, right: float
) -> None:
    # Proposals go on behind the end of an output: with what is not drawn any more.
    texts = [[*text, *range(20, 30)] for text in plain.texts]
    driver = Driver(CHECKPOINT, grammars=grammars, proposer=GuidedProposer(texts, right, VOCAB))
    tracked = begun()
    run_all(driver, tracked, drafts)
    for one, other in zip(tracked, plain.tracked, strict=True):
        assert one.output[:OUTPUT_COUNT] == other.output, one.sampling
        assert len(one.output) == len(other.output) or len(other.output) == OUTPUT_COUNT
        assert [entry.token_id for entry in one.logprobs] == (
            one.output if one.sampling.return_logprob else []
        )
        for entry, expected in zip(one.logprobs, other.logprobs, strict=False):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert entry.asked == [(4, pytest.approx(expected.asked[0][1], abs=1e-4))]
    accepted = sum(count for one in tracked for _, count in one.verified)
    assert (accepted == 0) == (right == 0.0)


def test_all_that_is_right_is_accepted_and_nothing_else(plain: Outputs) -> None:
    text = plain.texts[1]
    proposer = GuidedProposer([text], 1.0, VOCAB)
    driver = Driver(CHECKPOINT, proposer=proposer)
    one = track(0, text[:10], SAMPLINGS[1])
    driver.prefill(one)
    driver.step(decode=[one], drafts=5)
    assert one.verified == [(5, 5)] and one.tokens == text[:17]
    driver.step(decode=[one])  # a step may verify none
    assert one.verified == [(5, 5)] and one.tokens == text[:18]


def test_proposals_of_another_server_are_verified_first_and_bad_ones_cut_off(
    plain: Outputs,
) -> None:
    """They are a peer's values: a token outside the vocabulary ends them, and fails nothing."""
    text = plain.texts[0]
    for given, verified in (
        (text[10:13], (3, 3)),
        ([text[10], VOCAB, text[12]], (1, 1)),
        ([-1], None),
        (text[10:19], (4, 4)),
    ):
        driver = Driver(CHECKPOINT, proposer=NgramProposer())
        one = track(0, text[:10], SAMPLINGS[0])
        one.prompt_count, one.proposals = 9, given
        # Its cache came from elsewhere, but for the last token.
        driver.step(chunks=[(copy := track(5, text[:9]), 9)])
        one.pages, copy.pages = copy.pages, []
        driver.step(decode=[one], drafts=4)
        assert one.verified == ([verified] if verified else [])
        driver.decode([one], 5)
        assert one.tokens == text[: len(one.tokens)]


def test_a_run_ends_with_a_token_that_may_end_the_output(plain: Outputs) -> None:
    text = plain.texts[0]
    stop = text[12]
    sampling = greedy(stop_token_ids=(stop,))
    driver = Driver(CHECKPOINT, proposer=GuidedProposer([text], 1.0, VOCAB))
    one = track(0, text[:10], sampling)
    driver.prefill(one)
    assert stop not in text[10:12]
    driver.step(decode=[one], drafts=8)
    assert one.tokens == text[:13]


def test_a_token_that_can_not_be_drawn_behind_a_proposal_fails_where_it_is_drawn_next(
    plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = plain.texts[0]
    driver = Driver(CHECKPOINT, proposer=GuidedProposer([text], 1.0, VOCAB))
    one, beside = track(0, text[:10], SAMPLINGS[0]), track(1, text[:10], SAMPLINGS[0])
    for tracked in (one, beside):
        driver.prefill(tracked)
    sampler = driver.runner._sampler
    draw = sampler.draw

    def poisoned(logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> object:
        bad = [row for row, slot in enumerate(slots) if slot == 0 and positions[row] == 13]
        logits[bad] = float("nan")
        return draw(logits, slots, positions)

    monkeypatch.setattr(sampler, "draw", poisoned)
    done = driver.step(decode=[one, beside], drafts=4)
    assert not done.failed and one.tokens == text[:13] and beside.tokens == text[:16]
    done = driver.step(decode=[one, beside], drafts=4)
    assert done.failed == {0: NOT_FINITE} and beside.tokens == text[:21]


@pytest.mark.slow
def test_sequences_come_and_go_beside_those_with_proposals(
    plain: Outputs, grammars: GrammarCompiler
) -> None:
    """Slots are taken again, prompts and their log-probabilities share steps with verifications."""
    proposer: Proposer = GuidedProposer(plain.texts, 0.8, VOCAB)
    driver = Driver(CHECKPOINT, grammars=grammars, proposer=proposer)
    tracked = begun()
    going: list[Tracked] = []
    for one in tracked:
        half = len(one.tokens) // 2
        driver.step(chunks=[(one, half)], decode=going, drafts=3)
        going = [other for other in going if not has_ended(other)]
        driver.step(chunks=[(one, len(one.tokens) - half)], decode=going, drafts=3)
        going = [other for other in [*going, one] if not has_ended(other)]
        if len(going) > 3:
            left = going.pop(1)
            driver.step(retired=[left])
            driver.prefill(left)  # it comes back with its output, as one that was retracted
            going.append(left)
    while going := [one for one in going if not has_ended(one)]:
        driver.step(decode=going, drafts=3)
    for one, other in zip(tracked, plain.tracked, strict=True):
        assert one.output[:OUTPUT_COUNT] == other.output
