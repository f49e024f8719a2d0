"""One scheduler after another over the same real workers: nothing of the last one reaches the next,
and what could still write is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import Verify
from common.protocol.digests import Digest
from common.protocol.weights import LoadWeights, WeightsLoaded
from common.protocol.worker import (
    Begin,
    NewSequence,
    OpenPeer,
    PageGrant,
    PeerOpened,
    PrefillChunk,
    ReclaimPeer,
    Release,
    Step,
    StepDone,
    WorkerReady,
)
from common.protocol.worker_values import PeerWriter
from common.weights import ServedWeights
from tests.engine.tiny_checkpoints import RECIPES, Reference, build_checkpoint, random_prompt
from tests.worker.test_worker_processes import (
    DECODE_PAGES,
    GREEDY,
    PREFILL_PAGES,
    SEEDED,
    Pair,
    start_pair,
)
from tests.worker.whole_send import WholeSend
from tests.worker.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def rank_count() -> int:
    """Of the prefill server."""
    return 1


@pytest.fixture
def pair(rank_count: int, checkpoint: Path) -> Iterator[Pair]:
    changes = {"tp_size": rank_count, "cpu_thread_count": 1}
    for pair in start_pair(checkpoint, changes, {"transfer_mode": "auto"}):
        for server in (pair.prefill, pair.decode):
            take_on(server, "first")
        pair.connect()
        yield pair


def take_on(server: WorkerProcesses, session: str) -> list[WorkerReady]:
    """What a scheduler does with workers that it does not know, and their answers."""
    server.send(Begin(session))
    answers: list[WorkerReady] = []
    while len(answers) < len(server.processes):
        ready = server.expect(WorkerReady)
        if ready.session == session:
            answers.append(ready)
    server.forget_answers()
    return sorted(answers, key=lambda ready: ready.rank)


def leave_work(pair: Pair) -> None:
    """A scheduler that dies with sequences known, steps queued, a transfer and digests under way,
    and a Send that waits for a step that is never sent."""
    prompt = random_prompt(45, 1)
    for request_id in (1, 2):
        new = [NewSequence(request_id, prompt, 45, SEEDED)]
        pages = PREFILL_PAGES if request_id == 1 else list(range(40, 48))
        grants = [PageGrant(request_id, 0, 0, pages)]
        pair.prefill.send(Step(request_id, new, grants, [PrefillChunk(request_id, 0, 45, True)]))
    target = [(0, DECODE_PAGES[:6])]
    for send_id, step_id in ((1, 1), (2, 99)):
        whole = WholeSend(send_id, step_id, send_id, "decode", 0, 45, True,
                          [(0, PREFILL_PAGES[:6])], target)  # fmt: skip
        pair.prefill.request_send(whole)
    layout = pair.decode.ready[0].layout
    pair.prefill.send(Digest(1, layout, True, 45, [(0, PREFILL_PAGES[:6])], Verify.FULL))


@pytest.mark.parametrize(
    ("rank_count", "is_told"), [(2, False), (1, True)], ids=["crashed", "released"]
)
def test_what_a_scheduler_left_is_ended_and_the_next_one_computes_right(
    pair: Pair, oracle: Reference, is_told: bool
) -> None:
    leave_work(pair)
    if is_told:
        pair.prefill.send(Release(is_quiet=True))
    ready = take_on(pair.prefill, "second")
    assert [one.page_counts for one in ready] == [one.page_counts for one in pair.prefill.ready]
    assert [one.pid for one in ready] == [process.pid for process in pair.prefill.processes]
    take_on(pair.decode, "second")
    pair.connect()  # under the names of before
    prompt = random_prompt(37, 5)
    # The same ids and pages as before: a sequence that were still known would fail an assertion.
    alone = pair.prefill.generate(1, prompt, GREEDY, PREFILL_PAGES)
    assert alone == oracle.greedy(prompt, GREEDY.max_new_tokens)
    tokens, settled = pair.transfer(prompt, GREEDY, chunk=16)
    assert tokens == alone
    assert {message.error for message in settled} == {""}


def test_steps_of_the_last_scheduler_are_answered_to_nobody(pair: Pair) -> None:
    leave_work(pair)
    take_on(pair.prefill, "second")
    done = pair.prefill.step(
        new=[NewSequence(7, [5, 6, 7], 3, GREEDY)],
        grants=[PageGrant(7, 0, 0, [1])],
        chunks=[PrefillChunk(7, 0, 3, is_last=True)],
    )
    assert done.request_ids == [7]
    assert not pair.prefill.has_waiting(StepDone)


def test_who_was_let_in_is_told_until_it_is_out_of_reach(pair: Pair) -> None:
    writers = [PeerWriter("prefill"), PeerWriter("other", ["host"], [17])]
    pair.decode.send(OpenPeer("other", host_ids=["host"], pids=[17]))
    pair.decode.expect(PeerOpened)
    (ready,) = take_on(pair.decode, "second")
    assert ready.writers == writers
    pair.decode.send(ReclaimPeer("prefill"))
    (ready,) = take_on(pair.decode, "third")
    assert ready.writers == writers[1:]
    pair.decode.send(Release(is_quiet=False))
    (ready,) = take_on(pair.decode, "fourth")
    assert ready.writers == writers[1:]
    pair.decode.send(Release(is_quiet=True))
    (ready,) = take_on(pair.decode, "fifth")
    assert ready.writers == []


def test_a_scheduler_that_asks_twice_is_answered_twice(pair: Pair) -> None:
    assert take_on(pair.decode, "second") == take_on(pair.decode, "second")


@pytest.mark.parametrize("rank_count", [2])
def test_all_ranks_take_on_other_weights_with_the_scheduler_that_asked_for_them(
    pair: Pair, oracle: Reference, tmp_path: Path
) -> None:
    """Loaded beside steps that are computed; one that crashes first leaves the ranks as they
    were."""
    recipe, prompt = RECIPES["qwen3"], random_prompt(37, 5)
    other = build_checkpoint(replace(recipe, seed=recipe.seed + 1), tmp_path)
    old = oracle.greedy(prompt, GREEDY.max_new_tokens)
    new = Reference.load(other).greedy(prompt, GREEDY.max_new_tokens)

    def load(load_id: str) -> None:
        pair.prefill.send(LoadWeights(ServedWeights(str(other), version="b", load_id=load_id)))
        assert pair.prefill.generate(1, prompt, GREEDY, PREFILL_PAGES) == old
        loaded = [pair.prefill.expect(WeightsLoaded) for _ in range(2)]
        assert sorted((one.rank, one.load_id, one.error) for one in loaded) == [
            (0, load_id, ""),
            (1, load_id, ""),
        ]

    load("x")
    first = take_on(pair.prefill, "second")
    assert [one.weights.load_id for one in first] == ["", ""]
    assert pair.prefill.generate(1, prompt, GREEDY, PREFILL_PAGES) == old
    load("y")
    leave_work(pair)
    pair.prefill.send(Release(is_quiet=True, load_id="y"))
    ready = take_on(pair.prefill, "third")
    assert [one.weights.version for one in ready] == ["b", "b"]
    assert ready[0].fingerprint == ready[1].fingerprint != first[0].fingerprint
    assert pair.prefill.generate(1, prompt, GREEDY, PREFILL_PAGES) == new
    assert take_on(pair.prefill, "fourth")[0].weights == ready[0].weights
