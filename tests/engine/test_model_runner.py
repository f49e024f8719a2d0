"""The model runner against transformers, against itself in other company, and with bad requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.pending_step import NO_TOKEN
from common.engine.sampling.draw import NOT_FINITE
from common.request import SamplingParams
from tests.engine.runner_driver import PAGE_SIZE, Driver, Tracked, greedy, random_prompt, track
from tests.engine.tiny_checkpoints import VOCAB_SIZE, Reference

VOCAB = VOCAB_SIZE
LENGTHS = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE + 5]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Reference:
    return Reference.load(checkpoint)


@pytest.fixture
def driver(checkpoint: Path) -> Driver:
    return Driver(checkpoint)


# ---- against transformers ------------------------------------------------------------------------


def test_greedy_tokens_equal_transformers_for_prompts_around_a_page_in_one_batch(
    driver: Driver, oracle: Reference
) -> None:
    prompts = [random_prompt(length, VOCAB, length) for length in LENGTHS]
    tracked = [track(i, prompt, greedy()) for i, prompt in enumerate(prompts)]
    driver.step(chunks=[(t, len(t.tokens)) for t in tracked])
    driver.decode(tracked, 63)
    for one, prompt in zip(tracked, prompts, strict=True):
        assert len(one.output) == 64
        assert oracle.continues(prompt, one.output) == one.output, len(prompt)


def test_chunks_and_decodes_in_one_step_equal_transformers(
    driver: Driver, oracle: Reference
) -> None:
    early = track(7, random_prompt(11, VOCAB, 1), greedy())
    late = track(9, random_prompt(37, VOCAB, 2), greedy())
    driver.prefill(early)
    for count in (5, 1, 16, 15):  # given: a prompt computed beside a running decode
        driver.step(chunks=[(late, count)], decode=[early])
    driver.decode([late, early], 8)
    assert early.output == oracle.greedy(early.tokens[:11], 13)
    assert late.output == oracle.greedy(late.tokens[:37], 9)


@pytest.mark.parametrize("chunk", [1, 3, PAGE_SIZE, 2 * PAGE_SIZE + 1])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(checkpoint: Path, chunk: int) -> None:
    sampling = greedy(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=77)
    outputs = []
    for size in (None, chunk):
        driver = Driver(checkpoint)
        one = track(1, random_prompt(29, VOCAB, 5), sampling)
        driver.prefill(one, size)
        driver.decode([one], 20)
        outputs.append(one.output)
    assert outputs[0] == outputs[1]


# ---- log-probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 9, 25])
@pytest.mark.parametrize("chunk", [None, 4, PAGE_SIZE])
def test_prompt_logprobs_equal_transformers(
    driver: Driver, oracle: Reference, start: int, chunk: int | None
) -> None:
    prompt = random_prompt(26, VOCAB, 8)
    sampling = greedy(
        return_logprob=True, logprob_start_len=start, top_logprobs_num=2, token_ids_logprob=(9,)
    )
    one = track(1, prompt, sampling)
    beside = track(2, prompt[:5], greedy())
    driver.prefill(beside)
    while one.computed < 26:
        driver.step(chunks=[(one, min(chunk or 26, 26 - one.computed))], decode=[beside])
    driver.decode([one], 4)
    expected = oracle.logits(one.tokens).log_softmax(-1)
    entries = one.prompt_logprobs + one.logprobs
    assert [entry.token_id for entry in entries] == one.tokens[start:]
    for position, entry in enumerate(entries, start=start):
        if position == 0:
            assert (entry.logprob, entry.top, entry.asked) == (None, [], [])
            continue
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()
        assert entry.asked == [(9, pytest.approx(float(row[9]), abs=1e-4))]


def test_prompt_logprobs_come_only_if_asked_for(driver: Driver) -> None:
    silent = track(1, random_prompt(9, VOCAB, 1), greedy(return_logprob=True))
    single = track(2, [5], greedy(return_logprob=True, logprob_start_len=0))
    done = driver.step(chunks=[(silent, 9), (single, 1)])
    assert silent.prompt_logprobs == [] and set(done.prompt_logprobs) == {2}
    assert [entry.token_id for entry in single.prompt_logprobs] == [5]
    assert set(done.logprobs) == {1, 2}


# ---- company, transfers and retractions ---------------------------------------------------------


SAMPLINGS = [
    greedy(temperature=1.0, seed=1),
    greedy(temperature=0.8, top_k=20, seed=2, presence_penalty=0.6),
    greedy(repetition_penalty=1.3),
    greedy(temperature=1.1, top_p=0.8, min_p=0.02, seed=3, frequency_penalty=0.4),
    greedy(temperature=1.0, seed=4, logit_bias={7: 2.5}),
]


def run_alone(checkpoint: Path, index: int, count: int) -> list[int]:
    driver = Driver(checkpoint, seed=index)
    one = track(1, random_prompt(5 + 4 * index, VOCAB, index), SAMPLINGS[index])
    driver.prefill(one)
    driver.decode([one], count - 1)
    return one.output


def test_a_seeded_request_gives_the_same_alone_and_in_company(checkpoint: Path) -> None:
    driver = Driver(checkpoint, seed=99)
    running: list[Tracked] = []
    everyone = []
    for index, sampling in enumerate(SAMPLINGS):  # given: they arrive one by one
        one = track(40 - index, random_prompt(5 + 4 * index, VOCAB, index), sampling)
        driver.step(chunks=[(one, len(one.tokens))], decode=running)
        running.insert(0, one)
        everyone.append(one)
    driver.decode(running, 20)
    for index, one in enumerate(everyone):
        assert one.output[:20] == run_alone(checkpoint, index, 20)


@pytest.mark.parametrize("index", range(len(SAMPLINGS)))
def test_a_cache_copied_to_another_runner_continues_as_one_server_would(
    checkpoint: Path, index: int
) -> None:
    prefill, decode = Driver(checkpoint, seed=1), Driver(checkpoint, seed=2)
    prompt = random_prompt(5 + 4 * index, VOCAB, index)
    sent = track(1, prompt, SAMPLINGS[index])
    prefill.prefill(sent)
    received = Tracked(8, list(sent.tokens), len(prompt), SAMPLINGS[index], computed=len(prompt))
    decode.take_pages(received, len(prompt))
    nbytes = prefill.pool.layout.groups[0].page_nbytes
    for source, target in zip(sent.pages, received.pages, strict=True):
        decode.pool.buffers[0].view(-1, nbytes)[target] = prefill.pool.buffers[0].view(-1, nbytes)[
            source
        ]
    decode.decode([received], 19)
    assert received.output == run_alone(checkpoint, index, 20)


def test_a_retracted_request_goes_on_where_it_was(checkpoint: Path) -> None:
    driver = Driver(checkpoint, seed=4)
    beside = track(2, random_prompt(6, VOCAB, 9))
    one = track(1, random_prompt(5, VOCAB, 0), SAMPLINGS[0])
    driver.step(chunks=[(one, 5), (beside, 6)])
    driver.decode([one, beside], 8)
    known = len(one.tokens)
    # when: it is forgotten and comes back under its id in the same step, to be recomputed
    driver.step(chunks=[(one, 3)], decode=[beside], retired=[one])
    driver.step(chunks=[(one, known - 3)], decode=[beside])
    driver.decode([one], 10)
    assert one.output[:20] == run_alone(checkpoint, 0, 20)


def test_a_reused_slot_knows_nothing_of_its_last_request(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    for round_index in range(4):
        for index in (1, 3):
            one = track(index, random_prompt(5 + 4 * index, VOCAB, index), SAMPLINGS[index])
            driver.prefill(one)
            driver.decode([one], 9)
            assert one.output == run_alone(checkpoint, index, 10), round_index
            driver.step(retired=[one])
    assert driver.runner.sequence_count == 0


# ---- bad requests and bad numbers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sampling", "named"),
    [
        ([5, VOCAB], greedy(), f"token id {VOCAB}"),
        ([-1, 5], greedy(), "token id -1"),
        ([2**40], greedy(), f"token id {2**40}"),
        ([5], greedy(temperature=math.nan), "temperature=nan"),
        ([5], greedy(top_k=0), "top_k=0"),
        ([5], greedy(logit_bias={VOCAB: 1.0}), f"logit_bias: token id {VOCAB}"),
        ([5], greedy(token_ids_logprob=(-3,)), "token_ids_logprob=-3"),
    ],
)
def test_a_request_that_can_not_run_fails_alone_when_its_token_is_due(
    driver: Driver, tokens: list[int], sampling: SamplingParams, named: str
) -> None:
    good = track(1, random_prompt(6, VOCAB, 1))
    bad = track(2, tokens, sampling)
    done = driver.step(chunks=[(bad, len(tokens)), (good, 6)])
    assert list(done.failed) == done.unfit == [2] and named in done.failed[2]
    assert done.token_ids[0] == NO_TOKEN and len(good.output) == 1
    done = driver.step(decode=[good, bad])  # and again, until it is retired
    assert list(done.failed) == [2] and len(good.output) == 2
    driver.step(decode=[good], retired=[bad])
    assert driver.step(chunks=[(track(2, [5]), 1)]).failed == {}


def test_a_cache_that_is_not_finite_fails_its_sequence_alone(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    good = track(1, random_prompt(12, VOCAB, 1))
    bad = track(2, random_prompt(12, VOCAB, 2))
    driver.step(chunks=[(good, 12), (bad, 12)])
    driver.pool.view("k", 1)[bad.pages[0]] = math.nan
    done = driver.step(decode=[bad, good])
    assert done.failed == {2: NOT_FINITE} and done.unfit == []
    driver.decode([good], 5)
    alone = Driver(checkpoint)
    other = track(1, random_prompt(12, VOCAB, 1))
    alone.prefill(other)
    alone.decode([other], 6)
    assert good.output == other.output


def test_a_step_without_work_is_answered(driver: Driver) -> None:
    done = driver.step()
    assert (done.request_ids, done.token_ids, done.failed) == ([], [], {})


def test_a_token_without_a_page_is_a_bug_and_never_written_to_scratch(driver: Driver) -> None:
    one = track(1, random_prompt(PAGE_SIZE, VOCAB, 1))
    driver.prefill(one)
    one.pages.append(0)  # given: the scheduler forgot to grant the page of the next token
    with pytest.raises(AssertionError, match="no page"):
        driver.step(decode=[one])


@pytest.mark.parametrize("page_id", [0, 401])
def test_a_page_outside_the_pool_is_a_bug(driver: Driver, page_id: int) -> None:
    one = track(1, [5])
    one.pages = [page_id]
    with pytest.raises(AssertionError):
        driver.prefill(one)
