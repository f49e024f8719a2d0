"""A scheduler that is killed under its frontend and its workers: another one follows, and every
stream goes on, token for token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.fleet import Fleet, Node, wait_until
from tests.e2e.test_moves import answers_of, begin, check

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@dataclass
class Pair:
    prefill: Node
    decode: Node
    fleet: Fleet


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Iterator[Pair]:
    prefill = fleet.prefill()
    decode = fleet.decode([prefill])
    fleet.wait_ready()
    yield Pair(prefill, decode, fleet)
    fleet.wait_at_rest()


def kill_scheduler(node: Node) -> int:
    pid = node.process_id_of("scheduler_process")
    os.kill(pid, signal.SIGKILL)
    return pid


def test_streams_of_a_decode_server_go_on_after_its_schedulers_end(pair: Pair) -> None:
    answers = answers_of(pair.fleet, pair.decode)
    streams = begin(pair.fleet, pair.decode, answers)
    pid = kill_scheduler(pair.decode)
    check(streams, answers)
    assert pair.decode.process_id_of("scheduler_process") != pid
    assert "another scheduler has begun" in pair.decode.log
    pair.fleet.wait_at_rest()


def test_prompts_at_a_prefill_server_are_computed_after_its_schedulers_end(pair: Pair) -> None:
    answers = answers_of(pair.fleet, pair.decode)
    assert pair.prefill.post("/flush_cache", {}).status_code == 200
    streams = begin(pair.fleet, pair.decode, answers[:4])
    kill_scheduler(pair.prefill)
    streams += begin(pair.fleet, pair.decode, answers[4:])
    check(streams, answers)
    wait_until("the pair to be well again", lambda: pair.decode.get("/health").status_code == 200)
    pair.fleet.wait_at_rest()
