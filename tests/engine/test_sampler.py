"""The sampler against transformers' processors, against a plain formula, and against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.engine.host_copy import HostCopy
from common.engine.sampling.draw import ALL_MASKED, NOT_FINITE, Sampled
from common.engine.sampling.noise import gumbel, row_keys
from common.engine.sampling.sampler import CANDIDATE_COUNTS, Sampler
from common.engine.sampling.sampling_table import check_sampling
from common.request import SamplingParams

VOCAB = 97
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def params(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_new_tokens": 16, "seed": 1, "temperature": 0.0, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


def random_logits(row_count: int, vocab: int = VOCAB, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((row_count, vocab), generator=generator) * 3


def sampler_of(*requests: SamplingParams, vocab: int = VOCAB, prompt: int = 3) -> Sampler:
    """Slots 0, 1, ... with a prompt of `prompt` tokens each and no output yet."""
    sampler = Sampler(vocab, [2], CPU)
    for slot, request in enumerate(requests):
        sampler.add(slot, request, torch.arange(prompt), prompt)
    return sampler


def draw(sampler: Sampler, logits: Tensor, slots: list[int], position: int = 3) -> Sampled:
    positions = np.full(len(slots), position, dtype=np.int64)
    return sampler.sample(logits.clone(), np.array(slots, dtype=np.int64), positions)


def draw_many(request: SamplingParams, row: Tensor, draw_count: int) -> np.ndarray:
    """Tokens drawn from one row of logits at `draw_count` consecutive positions."""
    vocab = row.shape[0]
    sampler = sampler_of(*[request] * draw_count, vocab=vocab)
    slots = np.arange(draw_count)
    sampled = sampler.sample(row.repeat(draw_count, 1), slots, slots + 3)
    return np.array(sampled.token_ids)


# ---- greedy and penalties against transformers ---------------------------------------------------


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(5)
    sampler = sampler_of(*[params()] * 5)
    assert draw(sampler, logits, [4, 0, 1, 2, 3]).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-9, 1e-6, 1e-5])
def test_a_temperature_next_to_nothing_takes_the_largest_logit(temperature: float) -> None:
    logits = random_logits(8) - 50.0  # given: all negative, which would all become -inf
    sampler = sampler_of(*[params(temperature=temperature, top_p=0.5)] * 8)
    sampled = draw(sampler, logits, list(range(8)))
    assert sampled.token_ids == logits.argmax(-1).tolist() and not sampled.failed


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits = random_logits(3, seed=1)
    prompt = torch.tensor([5, 9, 5, 11])
    sampler = Sampler(VOCAB, [2], CPU)
    for slot in range(3):
        sampler.add(slot, params(repetition_penalty=penalty), prompt, len(prompt))
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    history = prompt.repeat(3, 1)
    for step in range(20):
        logits = random_logits(3, seed=step)
        expected = oracle(history, logits.clone()).argmax(-1)
        sampled = draw(sampler, logits, [0, 1, 2], position=len(prompt) + step)
        assert sampled.token_ids == expected.tolist()
        history = torch.cat((history, expected[:, None]), dim=1)


def test_presence_and_frequency_count_output_only_and_what_came_from_elsewhere() -> None:
    request = params(presence_penalty=0.7, frequency_penalty=1.1, repetition_penalty=1.2)
    tokens = [1, 2, 3, 7, 7, 8]  # given: three prompt tokens, then three generated elsewhere
    sampler = Sampler(VOCAB, [2], CPU)
    sampler.add(0, request, torch.tensor(tokens), 3)
    history = list(tokens)
    for step in range(40):
        logits = random_logits(1, seed=100 + step % 3)
        expected = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([history]), logits.clone())
        for token_id in set(history[3:]):
            expected[0, token_id] -= 1.1 * history[3:].count(token_id) + 0.7
        token = draw(sampler, logits, [0], position=len(history)).token_ids[0]
        assert token == int(expected.argmax())
        history.append(token)
    assert len(set(history[6:])) > 8  # the penalties really moved it off three argmaxes


def test_a_slot_forgets_the_counts_of_the_request_before() -> None:
    request = params(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    logits = random_logits(1)
    sampler = sampler_of(request)
    fresh = draw(sampler, logits, [0]).token_ids
    for _ in range(5):
        draw(sampler, logits, [0])
    sampler.remove(0)
    sampler.add(0, request, torch.arange(3), 3)
    assert draw(sampler, logits, [0]).token_ids == fresh


def test_logit_bias_equals_transformers() -> None:
    bias = {4: 3.5, 96: -100.0, 0: 100.0}
    oracle = SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()])
    logits = random_logits(2)
    expected = oracle(torch.zeros((2, 1), dtype=torch.long), logits.clone()).argmax(-1)
    sampler = sampler_of(params(logit_bias=bias), params())
    assert draw(sampler, logits, [0, 1]).token_ids == [
        int(expected[0]),
        int(logits[1].argmax()),
    ]


def test_min_new_tokens_holds_eos_and_stop_ids_back_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 40], logits[0, 50] = 9.0, 8.0, 7.0  # eos, a stop id, an ordinary one
    sampler = sampler_of(params(min_new_tokens=4, stop_token_ids=(40, 10_000)))
    oracle = MinLengthLogitsProcessor(3 + 4, torch.tensor([2, 40]))
    for position in range(3, 9):
        expected = oracle(torch.zeros((1, position), dtype=torch.long), logits.clone()).argmax()
        assert draw(sampler, logits, [0], position).token_ids == [int(expected)]
        assert int(expected) == (50 if position < 7 else 2)


# ---- filters against transformers ----------------------------------------------------------------


def warped(request: SamplingParams, logits: Tensor) -> Tensor:
    """Probabilities after transformers' warpers, in its order."""
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    x = TemperatureLogitsWarper(request.temperature)(ids, logits.clone())
    if request.top_k != -1:
        x = TopKLogitsWarper(request.top_k)(ids, x)
    if request.top_p < 1.0:
        x = TopPLogitsWarper(request.top_p)(ids, x)
    if request.min_p > 0.0:
        x = MinPLogitsWarper(request.min_p)(ids, x)
    return x.softmax(-1)


def _name(request: SamplingParams) -> str:
    return f"t{request.temperature}-k{request.top_k}-p{request.top_p}-m{request.min_p}"


FILTERS = [
    params(temperature=1.0),
    params(temperature=0.6),
    params(temperature=1.7, top_k=1),
    params(temperature=1.0, top_k=5),
    params(temperature=1.0, top_p=0.8),
    params(temperature=1.3, top_p=0.05),
    params(temperature=1.0, min_p=0.1),
    params(temperature=1.2, top_k=20, top_p=0.7),
    params(temperature=1.5, top_k=30, top_p=0.9, min_p=0.05),
    params(temperature=0.8, top_k=10_000, top_p=0.95),
]


@pytest.mark.parametrize("request_params", FILTERS, ids=_name)
def test_draws_follow_the_distribution_that_transformers_filters_leave(
    request_params: SamplingParams,
) -> None:
    row = random_logits(1, vocab=60, seed=7)[0]
    expected = warped(request_params, row[None])[0].double().numpy()
    draw_count = 20_000
    counts = np.bincount(draw_many(request_params, row, draw_count), minlength=60)
    assert counts[expected == 0].sum() == 0  # nothing filtered is ever drawn
    # Chi-square over cells expected at least 5 times, the rest pooled.
    mean = expected * draw_count
    is_big = mean >= 5
    observed = np.append(counts[is_big], counts[~is_big].sum())
    means = np.append(mean[is_big], mean[~is_big].sum())
    observed, means = observed[means > 0], means[means > 0]
    statistic = float(((observed - means) ** 2 / means).sum())
    freedom = len(means) - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom) + 4, (statistic, freedom)


@pytest.mark.parametrize("request_params", FILTERS, ids=_name)
def test_a_draw_is_the_argmax_of_filtered_logits_plus_noise(request_params: SamplingParams) -> None:
    """The fast paths (candidates, blocks) against the plain formula over the whole vocabulary."""
    logits = random_logits(200, vocab=500, seed=3)
    probs = warped(request_params, logits)
    sampler = sampler_of(*[request_params] * 200, vocab=500)
    sampled = draw(sampler, logits, list(range(200)), position=9)
    keys = row_keys(torch.full((200,), request_params.seed), torch.full((200,), 9))
    noise = gumbel(keys, torch.arange(500, dtype=torch.int32))
    assert sampled.token_ids == (probs.log() + noise).argmax(-1).tolist()


@pytest.mark.parametrize(
    "request_params",
    [
        params(temperature=1.0, top_p=0.9),
        params(temperature=1.0, top_p=0.3, min_p=0.001),
        params(temperature=1.0, top_k=CANDIDATE_COUNTS[-1] + 500, top_p=0.97),
        params(temperature=1.0, top_k=CANDIDATE_COUNTS[-1]),
        params(temperature=1.0, top_k=CANDIDATE_COUNTS[0]),
        params(temperature=1.0, top_k=CANDIDATE_COUNTS[0] + 1, top_p=0.9),
        params(temperature=1.0, top_k=40),
    ],
    ids=_name,
)
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
def test_a_nucleus_larger_than_the_candidates_is_still_drawn_right(
    request_params: SamplingParams, spread: float
) -> None:
    vocab = 3 * CANDIDATE_COUNTS[-1]
    logits = random_logits(24, vocab=vocab, seed=5) / 3 * spread
    probs = warped(request_params, logits)
    sampler = sampler_of(*[request_params] * 24, vocab=vocab)
    sampled = draw(sampler, logits, list(range(24)), position=9)
    keys = row_keys(torch.full((24,), 1), torch.full((24,), 9))
    noise = gumbel(keys, torch.arange(vocab, dtype=torch.int32))
    assert sampled.token_ids == (probs.log() + noise).argmax(-1).tolist()


# ---- independence and reproducibility ------------------------------------------------------------


MIX = [
    params(seed=11, temperature=1.0),
    params(seed=12, temperature=0.7, top_p=0.6),
    params(seed=13, temperature=1.0, top_k=7, repetition_penalty=1.4),
    params(seed=14),
    params(seed=15, frequency_penalty=1.5, presence_penalty=0.3),
    params(seed=16, temperature=1.4, min_p=0.2, logit_bias={3: 4.0}),
    params(seed=17, temperature=0.9, min_new_tokens=5, stop_token_ids=(1,)),
    params(seed=18, temperature=1.0, return_logprob=True, top_logprobs_num=3),
]


def test_a_request_draws_the_same_alone_in_any_company_and_in_any_slot() -> None:
    steps = 12
    logits = [random_logits(len(MIX), seed=step) for step in range(steps)]

    def run(order: list[int]) -> dict[int, list[int]]:
        sampler = Sampler(VOCAB, [2], CPU)
        slot_of = {index: 30 - place for place, index in enumerate(order)}
        for index in order:
            sampler.add(slot_of[index], MIX[index], torch.arange(4), 4)
        drawn: dict[int, list[int]] = {index: [] for index in order}
        for step in range(steps):
            order = order[1:] + order[:1]
            sampled = draw(sampler, logits[step][order], [slot_of[i] for i in order], 4 + step)
            for index, token_id in zip(order, sampled.token_ids, strict=True):
                drawn[index].append(token_id)
        return drawn

    together = run(list(range(len(MIX))))
    assert together == run(list(reversed(range(len(MIX)))))
    for index in range(len(MIX)):
        assert run([index])[index] == together[index]


def test_seeds_and_positions_each_change_the_draw() -> None:
    row = torch.zeros(VOCAB)  # given: all tokens equally likely
    sampler = sampler_of(*[params(seed=s, temperature=1.0) for s in range(200)])
    by_seed = draw(sampler, row.repeat(200, 1), list(range(200))).token_ids
    by_position = draw_many(params(temperature=1.0), row, 200)
    assert len(set(by_seed)) > 60 and len(set(by_position.tolist())) > 60
    assert draw(sampler, row.repeat(200, 1), list(range(200))).token_ids == by_seed


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    request = params(temperature=temperature, return_logprob=True, top_p=0.9)
    logits = random_logits(3)
    sampler = sampler_of(*[request] * 3)
    clean = draw(sampler, logits, [0, 1, 2])
    logits[1, 55] = bad
    sampled = draw(sampler, logits, [0, 1, 2])
    assert sampled.failed == {1: NOT_FINITE} and not sampled.unfit
    assert set(sampled.logprobs) == {0, 2}
    assert [sampled.token_ids[row] for row in (0, 2)] == [clean.token_ids[row] for row in (0, 2)]


def test_a_row_with_every_token_masked_fails_alone() -> None:
    sampler = Sampler(3, [0, 1], CPU)
    sampler.add(0, params(min_new_tokens=1, stop_token_ids=(2,)), torch.tensor([1]), 1)
    sampler.add(1, params(), torch.tensor([1]), 1)
    sampled = draw(sampler, torch.tensor([[1.0, 2, 3], [1, 2, 3]]), [0, 1], position=1)
    assert sampled.failed == {0: ALL_MASKED} and sampled.unfit == {0} and sampled.token_ids[1] == 2


def test_no_rows_draw_nothing() -> None:
    assert draw(sampler_of(params()), torch.zeros(0, VOCAB), []).token_ids == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1]=nan"),
        ({"token_ids_logprob": (VOCAB,)}, f"token_ids_logprob: token id {VOCAB}"),
        ({"top_logprobs_num": -1}, "top_logprobs_num=-1"),
    ],
)
def test_a_value_that_could_crash_a_batch_is_named(changes: dict[str, object], named: str) -> None:
    assert check_sampling(params(), VOCAB) is None
    error = check_sampling(params(**changes), VOCAB)
    assert error is not None and named in error


# ---- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_of_raw_logits_whatever_shapes_the_draw() -> None:
    request = params(
        temperature=0.5,
        top_k=3,
        repetition_penalty=1.9,
        logit_bias={8: 2.0},
        return_logprob=True,
        top_logprobs_num=4,
        token_ids_logprob=(90, 1),
    )
    plain = params(return_logprob=True)
    logits = random_logits(3)
    sampler = sampler_of(request, params(), plain)
    sampled = draw(sampler, logits, [0, 1, 2])
    expected = logits.double().log_softmax(-1)
    assert set(sampled.logprobs) == {0, 2}  # not of the one that did not ask
    entry = sampled.logprobs[0]
    assert entry.token_id == sampled.token_ids[0]
    assert entry.logprob == pytest.approx(float(expected[0, entry.token_id]), abs=1e-5)
    top = expected[0].topk(4)
    assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert [token_id for token_id, _ in entry.asked] == [90, 1]
    assert entry.asked[0][1] == pytest.approx(float(expected[0, 90]), abs=1e-5)
    assert sampled.logprobs[2].top == [] and sampled.logprobs[2].asked == []


def test_prompt_logprobs_in_blocks_equal_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.sampling.logprobs.ROW_BLOCK_ELEMENTS", 3 * VOCAB)
    sampler = sampler_of(params(return_logprob=True, top_logprobs_num=2, token_ids_logprob=(7,)))
    logits = random_logits(10)
    tokens = torch.arange(10) * 3
    launched = sampler.prompt_logprobs(logits, 0, tokens)
    entries = launched.entries(HostCopy(launched.tensors).wait())
    expected = logits.double().log_softmax(-1)
    assert [entry.token_id for entry in entries] == tokens.tolist()
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        assert entry.asked == [(7, pytest.approx(float(expected[row, 7]), abs=1e-5))]
        assert [i for i, _ in entry.top] == expected[row].topk(2).indices.tolist()
