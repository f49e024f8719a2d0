"""Every family forks: samples of one prompt go on from one cache, each as if it were alone.

What no sample wrote or copied is NaN, so a page that is not copied, or is shared and then written,
changes tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.planner.pairing import TokenRange
from common.protocol.worker import SampleDraw
from common.request import SamplingParams
from common.scheduling.forks import Forks
from common.scheduling.sequence import PageSpan, Sequence
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES, Case
from tests.families.server import Server, Shape, digests_of, greedy, least_nbytes, transfer
from tests.families.turns import turn_alone

pytestmark = pytest.mark.slow

COLD = Shape(page_size=16, chunk=48)
SEEDS = [7, 8, 9, 7, 30]
OUTPUT_COUNT = 12
SOAK = pytest.mark.soak
LENGTHS = (pytest.param(1, marks=SOAK), 16, 37, pytest.param(64, marks=SOAK), 81)
"""Before the first border, at one, and behind some."""


def sampling_of(seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=OUTPUT_COUNT, temperature=0.9, top_p=0.95, ignore_eos=True, seed=seed
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def servers(case: Case, tiny_checkpoint: Callable[[str], Path]) -> tuple[Server, Server, Server]:
    """Two of layouts that differ, and one that keeps nothing."""
    checkpoint = tiny_checkpoint(case.recipe)
    source, target = case.pairs[len(case.recipe) % len(case.pairs)]
    return (
        Server(checkpoint, source, 16),
        Server(checkpoint, target, 16),
        Server(checkpoint, COLD),
    )


def open_prompt(server: Server, prompt: list[int]) -> Sequence:
    """A prompt whose last chunk draws for every seed."""
    sequence = server.account.open(
        server.take_id(), list(prompt), len(prompt), greedy(OUTPUT_COUNT), digests_of(prompt)
    )
    assert sequence is not None
    sequence.samples = [SampleDraw(server.take_id(), seed) for seed in SEEDS]
    sequence.sampling = sampling_of(0)
    server.batcher.add(sequence)
    return sequence


def fork(
    server: Server, prompt: Sequence, first_tokens: list[int], ids: list[int]
) -> list[Sequence]:
    """Samples that begin with these tokens. Those with an id are known to the workers."""
    forks = Forks(server.account)
    samples = [
        Sequence(
            request_id,
            [*prompt.token_ids, token],
            prompt.prompt_count,
            sampling_of(seed),
            [PageSpan(0, []) for _ in prompt.spans],
            is_known=bool(ids),
        )
        for request_id, token, seed in zip(
            ids or [server.take_id() for _ in SEEDS], first_tokens, SEEDS, strict=True
        )
    ]
    pages = forks.reserve(len(prompt.token_ids), len(samples))
    server.batcher.add_samples(forks.fork(prompt, samples, pages), samples[0])
    server.batcher.remove(prompt)
    return samples


def outputs_alone(cold: Server, prompt: list[int]) -> list[list[int]]:
    """Of requests that share nothing."""
    samplings = [sampling_of(seed) for seed in SEEDS]
    return [one.output for one in turn_alone(cold, [prompt] * len(SEEDS), samplings)]


def outputs_of(samples: list[Sequence]) -> list[list[int]]:
    return [sample.token_ids[sample.prompt_count :] for sample in samples]


@pytest.mark.parametrize("length", LENGTHS)
def test_samples_of_one_transfer_equal_requests_that_come_alone(
    servers: tuple[Server, Server, Server], length: int
) -> None:
    source, target, cold = servers
    prompt = random_prompt(length, seed=length)
    given = open_prompt(source, prompt)
    source.compute([given])
    source.batcher.retire([sample.request_id for sample in given.samples])
    first_tokens = list(source.drawn.pop(given.request_id).values())
    spans = target.account.spans_for_prompt(length)
    needs = target.account.needs(spans, length)
    for span, pages in zip(spans, target.account.allocate(needs), strict=True):
        span.page_ids.extend(pages)
    taken = target.account.adopt(
        target.take_id(), list(prompt), length, sampling_of(0), spans, length, digests_of(prompt)
    )
    nbytes = transfer(
        source, given.page_lists(), target, taken.page_lists(), TokenRange(0, length, True)
    )
    assert nbytes == least_nbytes(target.layout, length), "as much as one sample takes"
    source.close(given)
    samples = fork(target, taken, first_tokens, [])
    target.decode()
    alone = outputs_alone(cold, prompt)
    assert outputs_of(samples) == alone
    for server in (source, target):
        assert server.account.flush_cache(), "a block is counted too often"
        assert not any(map(server.account.pool.used_count, range(len(server.account.groups))))


def test_samples_of_a_prompt_that_is_computed_here_equal_requests_that_come_alone(
    servers: tuple[Server, Server, Server],
) -> None:
    _, server, cold = servers
    prompt = random_prompt(53, seed=2)
    beside = server.open(random_prompt(90, seed=3), OUTPUT_COUNT)
    opened = open_prompt(server, prompt)
    ids = [sample.request_id for sample in opened.samples]
    while opened.request_id not in server.drawn:
        server.step(1)
    first_tokens = list(server.drawn.pop(opened.request_id).values())
    samples = fork(server, opened, first_tokens, ids)
    server.decode()
    alone = outputs_alone(cold, prompt)
    assert outputs_of(samples) == alone
    expected = cold.generate([random_prompt(90, seed=3)], OUTPUT_COUNT)
    assert outputs_of([beside]) == expected
    assert server.account.flush_cache()


def count_pages(server: Server) -> list[int]:
    return [server.account.pool.used_count(group) for group in range(len(server.account.groups))]


def count_owned(server: Server, token_count: int) -> list[int]:
    """Of a prompt and its samples: blocks once, all else for each."""
    cache = server.account.cache
    assert cache is not None
    own = Forks(server.account).own_indices(token_count, token_count + 1)
    blocks = cache.blocks_in(token_count)
    return [
        blocks * each + len(SEEDS) * len(one)
        for each, one in zip(cache.page_counts, own, strict=True)
    ]


def test_pages_of_samples_are_as_the_formula_says(
    servers: tuple[Server, Server, Server],
) -> None:
    """Nothing else runs, so all pages in use are those of the prompt and its samples."""
    _, server, _ = servers
    assert server.account.flush_cache()
    prompt = random_prompt(75, seed=9)
    opened = open_prompt(server, prompt)
    ids = [sample.request_id for sample in opened.samples]
    while opened.request_id not in server.drawn:
        server.step(1)
    first_tokens = list(server.drawn.pop(opened.request_id).values())
    samples = fork(server, opened, first_tokens, ids)
    for sample in samples:
        sample.cuts.clear()  # a checkpoint has pages of its own
        assert server.account.grow(sample, len(sample.token_ids))
    cache = server.account.cache
    assert cache is not None
    cache.checkpoints.forget_idle()
    assert count_pages(server) == count_owned(server, len(prompt))
    for sample in samples:
        server.batcher.remove(sample)
    assert server.account.flush_cache()


def test_samples_may_leave_in_any_order(servers: tuple[Server, Server, Server]) -> None:
    """Also before the step that copies for them; those that stay are right."""
    _, server, cold = servers
    prompt = random_prompt(41, seed=4)
    alone = outputs_alone(cold, prompt)
    for left_early, left_late in (([0, 4], [3]), ([], [4, 0])):
        opened = open_prompt(server, prompt)
        ids = [sample.request_id for sample in opened.samples]
        while opened.request_id not in server.drawn:
            server.step(1)
        first_tokens = list(server.drawn.pop(opened.request_id).values())
        samples = fork(server, opened, first_tokens, ids)
        for index in left_early:
            server.batcher.remove(samples[index])
        server.step(3)
        for index in left_late:
            server.batcher.remove(samples[index])
        server.decode()
        left = {*left_early, *left_late}
        stayed = [index for index in range(len(SEEDS)) if index not in left]
        assert [outputs_of(samples)[index] for index in stayed] == [alone[i] for i in stayed]
        assert server.account.flush_cache()
