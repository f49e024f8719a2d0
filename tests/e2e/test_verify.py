"""A decode server whose memory turns bits over, and which looks through what it is handed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.facts import is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, reply_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

DAMAGE = Path(__file__).parent / "damage"
ROOT = Path(__file__).parents[2]
DAMAGED_JOBS = (0, 2, 3, 4, 6)
"""Of the transfers in the order of the tests below: one, three in a row, and one of a router."""
QUESTION = make_question(77, 12)
PLAIN: Body = {"text": QUESTION.prompt, "sampling_params": {"temperature": 0}}


@dataclass
class Pair:
    prefill: Node
    decode: Node
    fleet: Fleet

    def counts(self) -> tuple[float, float]:
        """(verified, mismatched)."""
        counters = self.decode.info().counters
        return counters["verified"], counters["mismatched"]


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Iterator[Pair]:
    prefill = fleet.prefill("--page-size", "16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (DAMAGE, ROOT))))
        patch.setenv("DAMAGED_JOBS", ",".join(map(str, DAMAGED_JOBS)))
        # A self-test would be a transfer of its own, and a prompt that comes again none if its rest
        # were computed here: both would shift the damage.
        alone = ("--self-test-interval", "0", "--local-prefill", "off")
        decode = fleet.decode([prefill], "--page-size", "64", "--verify-transfer", "full", *alone)
    fleet.wait_ready()
    yield Pair(prefill, decode, fleet)


def test_both_servers_say_what_they_agreed_on(pair: Pair) -> None:
    """The prefill server was not told to: the stricter side decides."""
    for node in (pair.prefill, pair.decode):
        (peer,) = node.get("/server_info").json()["peers"]
        assert peer["verify"] == "full"
    assert pair.prefill.get("/server_info").json()["verify_transfer"] == "off"


def test_a_damaged_cache_is_transferred_again_and_the_answer_is_right(pair: Pair) -> None:
    assert is_right(QUESTION, pair.decode.generate(PLAIN).text)
    assert pair.counts() == (1, 1)
    (line,) = [line for line in pair.decode.log.splitlines() if "is not what was sent" in line]
    assert " of layer " in line and " in pages 1..1 of group full on rank 0" in line
    pair.fleet.wait_at_rest()


def test_a_cache_that_is_damaged_every_time_is_an_error_that_says_so(pair: Pair) -> None:
    message = pair.decode.refused("/generate", PLAIN, 500)
    assert "is not what was sent" in message
    assert pair.counts() == (1, 4)
    pair.fleet.wait_at_rest()


def test_the_damage_of_a_routed_request_is_made_good_as_well(pair: Pair) -> None:
    assert is_right(QUESTION, pair.decode.generate(PLAIN).text)
    where: Body = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefill.bootstrap_port,
        "bootstrap_room": 77,
    }
    halves = [pair.fleet.in_background(n, PLAIN | where) for n in (pair.prefill, pair.decode)]
    answers = [reply_of(half.result()) for half in halves]
    assert is_right(QUESTION, answers[1].text)
    assert pair.counts() == (3, 5)
    pair.fleet.wait_at_rest()


def test_the_metrics_count_what_was_compared_and_what_differed(pair: Pair) -> None:
    lines = pair.decode.get("/metrics").text.splitlines()
    events = {line for line in lines if line.startswith("baton:events_total")}
    assert any('event="verified"' in line and line.endswith(" 3.0") for line in events)
    assert any('event="mismatched"' in line and line.endswith(" 5.0") for line in events)
    # The last cell of a page is where the damage was done.
    assert any('event="mismatched in v of layer 2"' in line for line in events), events
