"""Real workers whose caches leave the pool for host memory and come back, ordered by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Role
from common.protocol.worker import (
    MovePages,
    NewSequence,
    PageCopies,
    PageGrant,
    PagesMoved,
    PrefillChunk,
)
from common.request import SamplingParams
from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.worker.worker_processes import ANSWER_TIMEOUT_S, WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

GREEDY = SamplingParams(max_new_tokens=16, seed=1, temperature=0.0)
PAGES = [9, 30, 4, 11, 2, 25, 6, 17]
OTHER_PAGES = [60, 3, 57, 40, 41, 42, 5, 59]
HOST_PAGES = [1, 2, 3, 70, 68, 69, 5, 4]
HOST_CACHE_GB = 0.001


def move(worker: WorkerProcesses, message: MovePages) -> None:
    """Every rank answers."""
    worker.send(message)
    answers = [worker.expect(PagesMoved) for _ in worker.processes]
    ranks = range(len(worker.processes))
    expected = [PagesMoved(message.move_id, rank) for rank in ranks]
    assert sorted(answers, key=lambda answer: answer.rank) == expected


def test_a_prompt_continues_from_pages_that_were_in_host_memory(checkpoint: Path) -> None:
    prompt = random_prompt(45, 3)
    tokens = Reference.load(checkpoint).greedy(prompt, GREEDY.max_new_tokens)
    changes = {"tp_size": 2, "host_cache_gb": HOST_CACHE_GB}
    with WorkerProcesses(checkpoint, Role.PREFILL, **changes) as worker:
        for ready in worker.wait_ready():
            (count,) = ready.host_page_counts
            assert count >= max(HOST_PAGES)
        first = worker.step(
            new=[NewSequence(1, prompt, len(prompt), GREEDY)],
            grants=[PageGrant(1, 0, 0, PAGES)],
            chunks=[PrefillChunk(1, 0, len(prompt), is_last=True)],
        )
        assert first.token_ids == tokens[:1]
        worker.step(retired=[1])
        move(worker, MovePages(1, True, [PageCopies(0, PAGES, HOST_PAGES)]))
        worker.generate(2, random_prompt(48, 4), GREEDY, PAGES)  # writes over what was there
        move(worker, MovePages(2, False, [PageCopies(0, HOST_PAGES, OTHER_PAGES)]))

        new = [NewSequence(3, prompt + tokens[:1], len(prompt), GREEDY)]
        output = worker.step(new=new, grants=[PageGrant(3, 0, 0, OTHER_PAGES)], decode=[3])
        continued = output.token_ids
        for _ in range(GREEDY.max_new_tokens - 2):
            continued += worker.step(decode=[3]).token_ids
        assert continued == tokens[1:]
        assert worker.shut_down() == [0, 0]


def test_a_move_to_a_tier_that_is_not_there_ends_the_worker_with_one_line(
    checkpoint: Path,
) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE) as worker:
        worker.wait_ready()
        worker.send(MovePages(1, True, [PageCopies(0, [1], [1])]))
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 1
        lines = worker.log.splitlines()
        assert len(lines) == 1 and "the host page thread failed: AssertionError" in lines[0]
