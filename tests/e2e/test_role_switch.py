"""Servers that go on in the other role: weights and pool are kept, and nobody's request fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import Body, Fleet, Node, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SWITCHES = ("--enable-role-switch", "--dtype", "float32", "--drain-timeout", "20")
CLIENT_COUNT = 6


def body(seed: int, output_count: int = 12) -> Body:
    """Prompts of which some begin alike."""
    rng = random.Random(seed)
    prompt = [*range(5, 5 + rng.randrange(1, 60)), *rng.choices(range(3, 900), k=seed % 50 + 1)]
    sampling = {"max_new_tokens": output_count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


@dataclass
class Pair:
    fleet: Fleet
    first: Node
    second: Node
    golden: Node


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two servers of which each may be either one, and one that computes alone."""
    with Fleet(tmp_path) as fleet:
        first = fleet.prefill(*SWITCHES, name="first", starts=False)
        second = fleet.decode("none", *SWITCHES, name="second", starts=False)
        for node in (first, second):
            node.add_flags("--prefill", f"{first.bootstrap},{second.bootstrap}")
            fleet.start(node)
        golden = fleet.decode([], "--dtype", "float32", name="golden")
        fleet.wait_ready()
        yield Pair(fleet, first, second, golden)


def test_a_pair_changes_places_and_answers_as_before(pair: Pair) -> None:
    workers = [node.process_id_of("common.worker") for node in (pair.first, pair.second)]
    expected = [pair.golden.generate(body(seed)).output_ids for seed in range(4)]
    assert [pair.second.generate(body(seed)).output_ids for seed in range(4)] == expected
    pair.second.switch("prefill")
    pair.first.switch("decode")
    pair.first.wait_ready()
    assert [pair.first.generate(body(seed)).output_ids for seed in range(4)] == expected
    assert pair.first.info().counters["finished"] == 4.0
    pair.first.switch("prefill")
    pair.second.switch("decode")
    pair.second.wait_ready()
    assert [pair.second.generate(body(seed)).output_ids for seed in range(4)] == expected
    kept = [node.process_id_of("common.worker") for node in (pair.first, pair.second)]
    assert kept == workers, "nothing was loaded again"
    for node in (pair.first, pair.second):
        node.wait_at_rest()


@pytest.mark.soak
def test_a_role_that_it_has_is_no_change_and_one_that_there_is_not_is_refused(pair: Pair) -> None:
    reply = pair.second.post("/switch_role", {"role": "decode"})
    assert reply.json() == {"success": True, "role": "decode", "is_done": True, "open_requests": 0}
    message = pair.second.refused("/switch_role", {"role": "router"}, 400)
    assert "router" in message and "prefill" in message
    message = pair.golden.refused("/switch_role", {"role": "prefill"}, 400)
    assert message.endswith("this decode server was started without --enable-role-switch")


@pytest.mark.soak
def test_a_stream_that_has_begun_ends_before_its_server_changes_its_role(pair: Pair) -> None:
    expected = pair.golden.generate(body(1, 400)).output_ids
    with pair.second.stream(body(1, 400)) as events:
        next(events)
        assert pair.second.post("/switch_role", {"role": "prefill"}).json()["open_requests"] == 1
        assert pair.second.post("/generate", body(2)).status_code == 503
        *_, last = events
    assert last.output_ids == expected
    wait_until("it to be a prefill server", lambda: pair.second.role == "prefill")


def test_a_server_on_standby_serves_as_soon_as_it_is_told_to(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        prefill = fleet.prefill("--dtype", "float32", "--standby")
        decode = fleet.decode([prefill], "--dtype", "float32", "--standby")
        for node in (prefill, decode):
            wait_until("its weights", lambda node=node: "workers are ready" in node.log)  # type: ignore[misc]
        wait_until("it to say so", lambda: "on standby" in decode.get("/health").text)
        assert "on standby" in decode.refused("/generate", body(1), 503)
        worker = decode.process_id_of("common.worker")
        prefill.switch("prefill")
        decode.switch("decode")
        fleet.wait_ready()
        assert len(decode.generate(body(1)).output_ids) == 12
        assert decode.process_id_of("common.worker") == worker
