"""Samples of one prompt, drawn from one row of logits: each as if it had been a request alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.protocol.worker import (
    NewSequence,
    PageCopies,
    PageGrant,
    PrefillChunk,
    SampleDraw,
    Step,
    StepDone,
)
from common.request import SamplingParams
from tests.engine.runner_driver import PAGE_SIZE, Driver, greedy, random_prompt, track
from tests.engine.tiny_checkpoints import VOCAB_SIZE

PROMPT = random_prompt(2 * PAGE_SIZE + 3, VOCAB_SIZE, 4)
PARENT = 50
SEEDS = {60: 3, 61: 4, 62: 3, 63: 99}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def driver(tiny_checkpoint: Callable[[str], Path]) -> Driver:
    driver = Driver(tiny_checkpoint("qwen3"))
    driver._free = [page for page in driver._free if not 300 <= page < 320]
    return driver


def begin(driver: Driver, sampling: SamplingParams, prompt: list[int] = PROMPT) -> StepDone:
    """The prompt's one chunk, whose samples draw."""
    page_count = -(-len(prompt) // PAGE_SIZE)
    pages = list(range(300, 300 + page_count))
    samples = [SampleDraw(request_id, seed) for request_id, seed in SEEDS.items()]
    chunk = PrefillChunk(PARENT, 0, len(prompt), is_last=True, samples=samples)
    new = NewSequence(PARENT, prompt, len(prompt), sampling)
    return driver.runner.run(Step(900, [new], [PageGrant(PARENT, 0, 0, pages)], [chunk]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "top_p": 0.9},
        {"temperature": 0.8, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 3},
    ],
)
def test_samples_draw_what_requests_of_their_seeds_would(
    driver: Driver, changes: dict[str, object]
) -> None:
    done = begin(driver, greedy(**changes))
    assert done.request_ids == list(SEEDS), "the parent draws nothing itself"
    for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
        alone = track(request_id + 100, PROMPT, greedy(**changes, seed=SEEDS[request_id]))
        driver.prefill(alone)
        assert alone.output == [token_id]
        if alone.logprobs:
            drawn, told = done.logprobs[request_id], alone.logprobs[0]
            assert (drawn.token_id, drawn.logprob) == (token_id, pytest.approx(told.logprob))
    assert set(done.prompt_logprobs) <= {PARENT}, "a prompt is told of once"


def test_samples_go_on_in_pages_of_their_own(driver: Driver) -> None:
    """The first step copies what the prompt's last page holds, and gives each its pages."""
    sampling = greedy(temperature=1.0)
    first = begin(driver, sampling)
    own = {request_id: 310 + place for place, request_id in enumerate(SEEDS)}
    grants = [PageGrant(r, 0, 0, [300, 301, page]) for r, page in own.items()]
    copies = [PageCopies(0, [302] * len(own), list(own.values()))]
    second = driver.runner.run(Step(901, [], grants, [], list(SEEDS), [PARENT], copies=copies))
    for request_id, *tokens in zip(SEEDS, first.token_ids, second.token_ids, strict=True):
        alone = track(request_id + 100, PROMPT, greedy(temperature=1.0, seed=SEEDS[request_id]))
        driver.prefill(alone)
        driver.decode([alone], 1)
        assert alone.output == tokens
    driver.runner.run(Step(902, retired=list(SEEDS)))
    assert driver.runner.sequence_count == len(SEEDS), "only those that were run alone are left"


def test_samples_of_a_prompt_that_can_not_be_run_fail_with_it(driver: Driver) -> None:
    done = begin(driver, greedy(), [*PROMPT, VOCAB_SIZE])
    assert set(done.failed) == set(SEEDS) == set(done.unfit)
    driver.runner.run(Step(901, retired=[*SEEDS, PARENT]))
    assert driver.runner.sequence_count == 0
