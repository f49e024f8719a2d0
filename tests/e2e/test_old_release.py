"""Servers of this release beside those of the first one: either role may be the older, and a fleet
is upgraded server by server."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec
import pytest

from demo.facts import is_right, make_question
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of, wait_until
from tests.e2e.old_release import start_of_tree, tree_of
from tests.e2e.replies import Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

GREEDY: Body = {"temperature": 0, "max_new_tokens": 48}
QUESTIONS = [make_question(700 + index, 6 + 3 * index) for index in range(4)]
PREFILL = ("--page-size", "32")
DECODE = ("--page-size", "8", "--local-prefill", "off", "--self-test-interval", "0")
ROOMS = itertools.count(5_000_000, 1000)


@dataclass
class Mixed:
    prefill: Node
    decode: Node
    fleet: Fleet
    is_old_prefill: bool


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of(1, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module", params=[True, False], ids=["old prefill", "old decode"])
def mixed(
    request: pytest.FixtureRequest, old_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    is_old_prefill: bool = request.param
    with Fleet(tmp_path_factory.mktemp("logs"), CHECKPOINT) as fleet:
        prefill = fleet.prefill(*PREFILL, starts=False)
        decode = fleet.decode([prefill], *DECODE, starts=False)
        start_of_tree(fleet, prefill, old_tree if is_old_prefill else None)
        start_of_tree(fleet, decode, None if is_old_prefill else old_tree)
        fleet.wait_ready()
        yield Mixed(prefill, decode, fleet, is_old_prefill)
        fleet.wait_at_rest()


def test_prompts_of_any_length_turn_after_turn(mixed: Mixed) -> None:
    for question in QUESTIONS:
        text = question.prompt
        for _ in range(2):
            reply = mixed.decode.generate({"text": text, "sampling_params": GREEDY})
            assert is_right(question, reply.text), reply.text
    assert mixed.decode.info().counters["finished"] == 2 * len(QUESTIONS)
    assert mixed.decode.info().counters["retried"] == 0


def test_the_versions_that_both_speak_is_shown(mixed: Mixed) -> None:
    new = mixed.decode if mixed.is_old_prefill else mixed.prefill
    assert [peer.version for peer in new.info().peers] == [1]


@pytest.mark.parametrize("order", ["prefill first", "decode first"])
def test_samples_of_a_router_s_body_meet_one_by_one(mixed: Mixed, order: str) -> None:
    """The older server knows of a room for each of them."""
    body: Body = {
        "text": QUESTIONS[0].prompt,
        "sampling_params": {**GREEDY, "n": 3},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": mixed.prefill.bootstrap_port,
        "bootstrap_room": next(ROOMS),
    }
    nodes = [mixed.prefill, mixed.decode]
    if order == "decode first":
        nodes.reverse()
    halves = {node.name: mixed.fleet.in_background(node, body) for node in nodes}
    decoded = halves["decode"].result()
    assert halves["prefill"].result().status_code == decoded.status_code == 200, decoded.text
    replies = msgspec.json.decode(decoded.content, type=list[Reply])
    assert [is_right(QUESTIONS[0], reply.text) for reply in replies] == [True] * 3


@pytest.mark.soak
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_fleet_is_upgraded_server_by_server_under_load(
    first: str, old_tree: Path, tmp_path: Path
) -> None:
    """Two servers of each role; one after the other drains, ends, and comes back as this release.
    Who gets a 503 from a server that drains asks the other one, as a router does."""
    with Fleet(tmp_path, CHECKPOINT) as fleet:
        prefills = [fleet.prefill(*PREFILL, name=f"p{i}", starts=False) for i in range(2)]
        decodes = [fleet.decode(prefills, *DECODE, name=f"d{i}", starts=False) for i in range(2)]
        for node in (*prefills, *decodes):
            start_of_tree(fleet, node, old_tree)
        fleet.wait_ready()
        is_over, answered = Event(), itertools.count()
        wrong: list[str] = []

        def client(number: int) -> None:
            rng = random.Random(number)
            while not is_over.is_set():
                question = rng.choice(QUESTIONS)
                body: Body = {"text": question.prompt, "sampling_params": GREEDY}
                response = None
                while response is None or response.status_code == 503:
                    if is_over.wait(0.02):
                        return
                    response = rng.choice(decodes).try_post("/generate", body)
                if response.status_code != 200 or not is_right(question, reply_of(response).text):
                    wrong.append(response.text)
                next(answered)

        with ThreadPoolExecutor(6) as clients:
            running = [clients.submit(client, number) for number in range(6)]
            try:
                nodes = [*prefills, *decodes] if first == "prefill" else [*decodes, *prefills]
                for node in nodes:
                    assert node.terminate() == 0
                    node.start().wait_ready()
                    before = next(answered)
                    wait_until("answers", lambda since=before: next(answered) > since + 30, 60.0)  # type: ignore[misc]
            finally:
                is_over.set()
            for one in running:
                one.result()
        assert not wrong
        for node in (*prefills, *decodes):
            assert all(peer.version == 2 for peer in node.info().peers if peer.state == "connected")
        fleet.wait_at_rest()
