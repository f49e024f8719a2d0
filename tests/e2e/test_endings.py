"""How a server ends: asked, it finishes what it has begun; struck, it says so; either way nothing
of it is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.runtime.scheduler_loop import PAUSE_MAX_S
from demo.servers import stop_servers
from tests.e2e.fleet import (
    STOP_TIMEOUT_S,
    WAIT_TIMEOUT_S,
    Body,
    Fleet,
    Node,
    error_message,
    is_alive,
    reply_of,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LONG: Body = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
ENDLESS: Body = LONG | {"max_new_tokens": 1900}
SHARED = Path("/dev/shm")
SHARED_MEMORY = re.compile(r"(/dev/shm/\S+)")


class Remains:
    """What a running server holds, to see later that it is gone."""

    def __init__(self, node: Node) -> None:
        self.pids = node.process_ids()
        self.runtime_dir = Path(str(node.get("/server_info").json()["runtime_dir"]))
        self.shared: set[Path] = set()
        for pid in self.pids:
            maps = Path(f"/proc/{pid}/maps").read_text()
            self.shared |= {Path(name) for name in SHARED_MEMORY.findall(maps)}
        assert len(self.pids) == 4, "supervisor, scheduler, worker, frontend"
        assert self.runtime_dir.is_dir()
        assert self.shared, "the pool lies in shared memory"

    def check_gone(self) -> None:
        wait_until("its processes to be gone", lambda: not any(map(is_alive, self.pids)))
        assert not self.runtime_dir.exists()
        assert not [path for path in self.shared if path.exists()]


@pytest.fixture(scope="module")
def prefill(fleet: Fleet) -> Node:
    return fleet.prefill("--transport", "shm").wait_ready()


@pytest.fixture
def decode(fleet: Fleet, prefill: Node) -> Iterator[Node]:
    """A fresh decode server, which the test ends."""
    node = fleet.decode([prefill], "--transport", "shm", "--drain-timeout", "30").wait_ready()
    yield node
    fleet.nodes.remove(node)
    stop_servers([node.server], STOP_TIMEOUT_S)  # it runs still if its test has failed
    prefill.wait_at_rest()


def body(sampling: Body) -> Body:
    return {"text": "Facts:", "sampling_params": sampling}


def test_a_server_that_is_told_to_stop_finishes_what_runs(fleet: Fleet, decode: Node) -> None:
    remains = Remains(decode)
    plain = fleet.in_background(decode, body(LONG))
    with decode.stream(body(LONG)) as events:
        next(events)
        decode.wait_queued("running", 2)
        decode.server.process.send_signal(signal.SIGTERM)
        last = list(events)[-1]
    assert len(last.output_ids) == LONG["max_new_tokens"]
    assert reply_of(plain.result()).output_ids == last.output_ids
    assert decode.server.process.wait(WAIT_TIMEOUT_S) == 0
    remains.check_gone()


def test_a_planned_stop_is_told_to_peers_and_is_no_loss(fleet: Fleet, prefill: Node) -> None:
    lost_count = prefill.info().counters["peers_lost"]
    ways = ("--transport", "shm", "--name", "blue")
    decode = fleet.decode([prefill], *ways).wait_ready()
    assert "blue" in [peer.name for peer in prefill.info().peers]
    assert decode.terminate() == 0
    assert "stopping: 1 peers are told, 0 requests are given up; since the start: " in decode.log
    wait_until(
        "its peer to know",
        lambda: "disconnected from decode server blue: it was told to stop" in prefill.log,
    )
    assert prefill.info().counters["peers_lost"] == lost_count


def test_a_scheduler_that_is_stopped_is_red_at_once_and_says_so_later(
    decode: Node, prefill: Node
) -> None:
    """Its peers gave it up, and have no part in it."""
    lost_count = prefill.info().counters["peers_lost"]
    with decode.frozen("scheduler_process"):
        reply = decode.get("/health")
        assert reply.status_code == 503 and "is stopped" in error_message(reply)
        wait_until("its peer to notice", lambda: prefill.info().counters["peers_lost"] > lost_count)
        time.sleep(2 * PAUSE_MAX_S)  # its last heartbeat may have been some time before the stop
    wait_until("it to know", lambda: "this scheduler did not run for" in decode.log)
    wait_until("it to be told", lambda: "it gave us up: no heartbeat" in decode.log)
    wait_until("it to be well", lambda: decode.get("/health").status_code == 200)


def test_a_second_signal_ends_a_draining_server_at_once(fleet: Fleet, decode: Node) -> None:
    remains = Remains(decode)
    with decode.stream(body(ENDLESS)) as events:
        next(events)
        decode.server.process.send_signal(signal.SIGINT)
        wait_until("it to drain", lambda: "draining" in decode.log)
        decode.server.process.send_signal(signal.SIGINT)
        assert decode.server.process.wait(WAIT_TIMEOUT_S) != 0
    remains.check_gone()


@pytest.mark.parametrize("module", ["common.worker", "common.frontend"])
def test_a_killed_process_ends_its_server_and_is_named(
    fleet: Fleet, decode: Node, module: str
) -> None:
    remains = Remains(decode)
    running = fleet.in_background(decode, body(ENDLESS))
    decode.wait_queued("running")
    os.kill(decode.process_id_of(module), signal.SIGKILL)
    assert decode.server.process.wait(WAIT_TIMEOUT_S) not in (0, 2)
    assert "signal 9" in decode.log
    remains.check_gone()
    if module == "common.frontend":
        assert running.exception() is not None, "its connection broke with its server"
    else:
        assert running.result().status_code >= 500


def test_what_a_server_leaves_that_is_killed_as_it_makes_its_memory_is_removed_by_the_next(
    fleet: Fleet,
) -> None:
    large = ("--transport", "shm", "--max-total-tokens", str(1 << 20))
    doomed = fleet.decode([], *large, name="doomed")
    pid = doomed.server.process.pid
    wait_until("it to make its memory", lambda: any(SHARED.glob(f"baton-decode-{pid}-*/ucx_*")))
    doomed.kill()
    (left,) = SHARED.glob(f"baton-decode-{pid}-*")
    fleet.decode([], "--transport", "shm", name="next").wait_ready()
    assert not left.exists()


def test_a_killed_supervisor_takes_its_processes_along(decode: Node) -> None:
    remains = Remains(decode)
    decode.server.process.kill()
    decode.server.process.wait()
    wait_until("its processes to be gone", lambda: not any(map(is_alive, remains.pids)))
    assert not [path for path in remains.shared if path.exists()]
