"""Tokens that a request never draws, against rules that are read word by word."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.sampling.draw import ALL_MASKED
from common.engine.sampling.sampler import Sampler
from common.engine.sampling.sampling_table import check_sampling
from common.request import SamplingParams
from common.request_bounds import BAD_WORD_LENGTH_MAX

VOCAB = 11  # so few that words are met all the time
CPU = torch.device("cpu")
PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def params(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_new_tokens": 99, "seed": 1, "temperature": 0.0, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


def slow_allowed(request: SamplingParams, output: list[int]) -> set[int]:
    """vLLM's rules: `allowed_token_ids`, and of each bad word the last token behind the others."""
    allowed = set(request.allowed_token_ids or range(VOCAB))
    for word in request.bad_words:
        beginning = list(word[:-1])
        if not beginning or output[-len(beginning) :] == beginning:
            allowed.discard(word[-1])
    return allowed


def random_request(rng: random.Random) -> SamplingParams:
    words = tuple(
        tuple(rng.choices(range(VOCAB), k=rng.choice([1, 1, 2, 2, 3, 4])))
        for _ in range(rng.choice([0, 0, 1, 4, 20]))
    )
    allowed = rng.sample(range(VOCAB), k=rng.randint(6, VOCAB)) if rng.random() < 0.5 else []
    return params(
        seed=rng.randrange(1000),
        temperature=rng.choice([0.0, 1.0]),
        allowed_token_ids=tuple(allowed),
        bad_words=words,
        repetition_penalty=rng.choice([1.0, 1.3]),
        logit_bias={0: 30.0} if rng.random() < 0.3 else {},
    )


def logits_of(count: int, seed: int) -> Tensor:
    return torch.randn((count, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


class Alone:
    """One request in a sampler of its own, begun anew with all its tokens before every draw."""

    def __init__(self, request: SamplingParams) -> None:
        self.request = request

    def draw(self, logits: Tensor, output: list[int]) -> int | None:
        sampler = Sampler(VOCAB, [], CPU)
        sampler.add(0, self.request, torch.tensor(PROMPT + output), len(PROMPT))
        positions = np.array([len(PROMPT) + len(output)])
        sampled = sampler.sample(logits.clone().unsqueeze(0), np.array([0]), positions)
        return None if sampled.failed else sampled.token_ids[0]


@pytest.mark.parametrize("seed", range(8))
def test_draws_obey_the_rules_and_do_not_depend_on_the_batch_or_on_when_they_began(
    seed: int,
) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(9)]
    sampler = Sampler(VOCAB, [], CPU)
    outputs: dict[int, list[int]] = {}
    met_count = failed_count = 0
    for step in range(40):
        for slot, request in enumerate(requests):
            if slot not in outputs:  # some join late, with output that came from elsewhere
                outputs[slot] = [] if slot % 2 else [4, 4]
                ids = torch.tensor(PROMPT + outputs[slot])
                sampler.add(slot, request, ids, len(PROMPT))
        slots = rng.sample(sorted(outputs), k=rng.randint(1, len(requests)))
        logits = logits_of(len(slots), step)
        positions = np.array([len(PROMPT) + len(outputs[slot]) for slot in slots])
        sampled = sampler.sample(logits.clone(), np.array(slots), positions)
        for row, slot in enumerate(slots):
            request, output = requests[slot], outputs[slot]
            allowed = slow_allowed(request, output)
            if not allowed:
                assert sampled.failed[row] == ALL_MASKED and row in sampled.unfit
                failed_count += 1
                sampler.remove(slot)
                del outputs[slot]
                continue
            token = sampled.token_ids[row]
            assert token in allowed
            assert token == Alone(request).draw(logits[row], output)
            if request.temperature == 0 and request.repetition_penalty == 1.0:
                bias = torch.zeros(VOCAB)
                bias[list(request.logit_bias)] = 30.0
                assert token == max(allowed, key=lambda one: float((logits[row] + bias)[one]))
            met_count += len(allowed) < len(set(request.allowed_token_ids or range(VOCAB)))
            output.append(token)
        if rng.random() < 0.2 and slots[0] in outputs:  # and one leaves, for another in its slot
            sampler.remove(slots[0])
            requests[slots[0]] = random_request(rng)
            del outputs[slots[0]]
    assert met_count > 20  # else nothing was forbidden


def test_a_request_without_a_token_left_fails_alone() -> None:
    sampler = Sampler(VOCAB, [], CPU)
    for slot, request in enumerate(
        [params(allowed_token_ids=(5,), bad_words=((5,),)), params(allowed_token_ids=(5,))]
    ):
        sampler.add(slot, request, torch.tensor(PROMPT), len(PROMPT))
    sampled = sampler.sample(logits_of(2, 0), np.array([0, 1]), np.array([3, 3]))
    assert sampled.failed == {0: ALL_MASKED}
    assert sampled.unfit == {0} and sampled.token_ids[1] == 5


def test_the_longest_word_is_found_behind_all_its_other_tokens_only() -> None:
    word = tuple(i % 7 for i in range(BAD_WORD_LENGTH_MAX))
    request = params(bad_words=(word,), logit_bias={word[-1]: 100.0})
    whole, short = list(word[:-1]), list(word[1:-1])
    assert Alone(request).draw(torch.zeros(VOCAB), whole) != word[-1]
    assert Alone(request).draw(torch.zeros(VOCAB), [8, *short]) == word[-1]
    assert Alone(request).draw(torch.zeros(VOCAB), short) == word[-1]


def test_a_prompt_that_ends_with_a_words_beginning_forbids_nothing() -> None:
    """As in vLLM, whose words are compared with the output alone."""
    request = params(bad_words=((2, 3, 4), (3, 5)), logit_bias={5: 100.0})
    assert Alone(request).draw(torch.zeros(VOCAB), []) == 5


@pytest.mark.parametrize(
    "changes", [{"allowed_token_ids": (0, VOCAB)}, {"bad_words": ((1,), (2, VOCAB))}]
)
def test_a_token_outside_the_vocabulary_is_named(changes: dict[str, object]) -> None:
    told = check_sampling(params(**changes), VOCAB)
    assert told == f"{next(iter(changes))}: token id {VOCAB}: must be in 0..{VOCAB - 1}"


@pytest.mark.parametrize(
    ("changes", "token_id", "is_forbidden"),
    [
        ({}, 3, False),
        ({"allowed_token_ids": (3,)}, 3, False),
        ({"allowed_token_ids": (4,)}, 3, True),
        ({"bad_words": ((3,),)}, 3, True),
        ({"bad_words": ((3, 3), (4,))}, 3, False),
    ],
)
def test_an_output_does_not_begin_with_what_its_first_draw_forbids(
    changes: dict[str, object], token_id: int, is_forbidden: bool
) -> None:
    request = params(**changes)
    assert request.forbids_first(token_id) is is_forbidden
    assert (token_id not in slow_allowed(request, [])) is is_forbidden
