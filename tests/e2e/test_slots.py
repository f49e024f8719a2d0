"""Servers with slots for two requests, and many more requests than that.

A request's state is in one slot that others had before: whoever finds none waits, on either side,
and nothing of a former owner may show. Outputs are held against the reference, so one number of
another request's state is a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.engine.tiny_checkpoints import Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

CHECKPOINT_MAX = 3
FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--page-size", "8",
         "--max-checkpoints", str(CHECKPOINT_MAX))  # fmt: skip
SLOT_COUNT = 2
QUEUE_MAX = 12
NARROW = ("--max-running-requests", str(SLOT_COUNT), "--max-queued-requests", str(QUEUE_MAX))
# Within a page, at the ends of pages and chunks, and over several of both.
LENGTHS = (1, 3, 7, 8, 9, 16, 39, 40, 41, 64, 90, 120)
OUTPUT_COUNT = 12
GIVEN_UP_OUTPUT_COUNT = 20
ROUND_COUNT = 3
LONG_OUTPUT_COUNT = 900


@dataclass
class Town:
    """A prefill server and a decode server with two slots each, and one with many."""

    prefill: Node
    narrow: Node
    wide: Node
    expected: Callable[[int], list[int]]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.prefill, self.narrow, self.wide)


@pytest.fixture(scope="module")
def started(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Town:
    fleet.model_path = tiny_checkpoint("qwen3_next")
    chunks = ("--chunked-prefill-size", "40")
    prefill = fleet.prefill(*FLAGS, *NARROW, *chunks)
    patience = ("--worker-timeout", "30")  # its worker is frozen to hold things up
    narrow = fleet.decode([prefill], *FLAGS, *NARROW, *patience, name="narrow")
    wide = fleet.decode([prefill], *FLAGS, name="wide")
    oracle = Reference.load(fleet.model_path)

    @cache
    def expected(length: int) -> list[int]:
        return oracle.greedy(random_prompt(length, seed=length), GIVEN_UP_OUTPUT_COUNT)

    fleet.wait_ready()
    return Town(prefill, narrow, wide, expected)


@pytest.fixture
def town(started: Town, fleet: Fleet) -> Iterator[Town]:
    """The servers at rest; no slot or page may be left after any test."""
    yield started
    fleet.wait_at_rest()


def body_of(length: int, output_count: int, rid: str) -> Body:
    return {
        "input_ids": random_prompt(length, seed=length),
        "sampling_params": {"temperature": 0, "max_new_tokens": output_count, "ignore_eos": True},
        "rid": rid,
    }


def slots_of(node: Node) -> int:
    (group,) = [group for group in node.info().page_groups if group.name.startswith("slot")]
    return group.total


def test_there_are_as_many_slots_as_requests_may_run_and_checkpoints_be_kept(town: Town) -> None:
    running = (SLOT_COUNT, SLOT_COUNT, 256)
    assert [slots_of(node) - CHECKPOINT_MAX for node in town.nodes] == list(running)
    for node in town.nodes:
        (worker,) = node.get("/server_info").json()["workers"]
        assert worker["checkpoints"].startswith(f"{CHECKPOINT_MAX} x ")
    told = [node.get("/server_info").json()["max_running_requests"] for node in town.nodes]
    assert told == [SLOT_COUNT, SLOT_COUNT, 256]


@pytest.mark.parametrize("decode", ["narrow", "wide"])
def test_many_requests_take_turns_with_the_slots_while_others_are_given_up(
    fleet: Fleet, town: Town, decode: str
) -> None:
    """Behind the wide server it is the prefill server that runs out of slots."""
    node = town.narrow if decode == "narrow" else town.wide
    for index in range(ROUND_COUNT):
        pending: dict[int, Future[httpx.Response]] = {}
        given_up: dict[int, Future[httpx.Response]] = {}
        # Every third one will be given up; each round starts and gives up others.
        for place, length in enumerate(LENGTHS[index:] + LENGTHS[:index]):
            if place % 3 == 1:
                body = body_of(length, GIVEN_UP_OUTPUT_COUNT, f"{decode} drop {index} {length}")
                given_up[length] = fleet.in_background(node, body)
            else:
                body = body_of(length, OUTPUT_COUNT, f"{decode} keep {index} {length}")
                pending[length] = fleet.in_background(node, body)
        for length in given_up:  # one by one, in whatever state each is by then
            node.post("/abort_request", {"rid": f"{decode} drop {index} {length}"})
        for length, future in pending.items():
            reply = reply_of(future.result())
            assert reply.output_ids == town.expected(length)[:OUTPUT_COUNT], (index, length)
        for length, future in given_up.items():
            reply = reply_of(future.result())
            until = len(reply.output_ids)
            assert reply.output_ids == town.expected(length)[:until], (index, length)
            assert reply.finish.type in ("abort", "length")


@contextmanager
def taken_slots(node: Node) -> Iterator[None]:
    """A time in which two requests have the slots and do not end, and the cache of a third, which
    took that of a checkpoint, waits for them; then all hang up."""
    with ExitStack() as streams:
        kept = []  # whoever drops the events hangs up
        for index in range(SLOT_COUNT + 1):
            body = body_of(40 + index, LONG_OUTPUT_COUNT, f"long {index}")
            kept.append(streams.enter_context(node.stream(body)))
            assert next(kept[-1]).meta_info.finish_reason is None
        with node.frozen("common.worker"):
            yield
            streams.close()


def test_who_hangs_up_frees_a_slot_for_who_waits(fleet: Fleet, town: Town) -> None:
    with taken_slots(town.narrow):
        waiting = fleet.in_background(town.narrow, body_of(64, OUTPUT_COUNT, "waits"))
        town.narrow.wait_queued("waiting")
    assert reply_of(waiting.result()).output_ids == town.expected(64)[:OUTPUT_COUNT]


def test_behind_two_slots_a_full_queue_is_told_and_who_is_in_it_is_served(
    fleet: Fleet, town: Town
) -> None:
    with taken_slots(town.narrow):
        pending = [
            fleet.in_background(town.narrow, body_of(length, OUTPUT_COUNT, f"queued {length}"))
            for length in LENGTHS
        ]
        town.narrow.wait_queued("waiting", QUEUE_MAX)
        assert "queue full" in town.narrow.refused("/generate", body_of(5, 4, "one more"), 503)
    replies = [reply_of(future.result()).output_ids for future in pending]
    assert replies == [town.expected(length)[:OUTPUT_COUNT] for length in LENGTHS]
