"""Prefill servers are added to a running decode server and removed from it, by a file, by operators
and by a name server, while clients ask: no request fails for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from demo.facts import is_right, make_question
from demo.servers import free_ports
from tests.e2e.fleet import Body, Fleet, Node, reply_of, wait_until
from tests.e2e.name_server import NameServer

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# No prompt is there already, and each takes some steps.
SLOW = ("--chunked-prefill-size", "16", "--disable-radix-cache")
CLIENT_COUNT = 6
NAME_SERVER = "127.53.53.53"
NAME, FULL_NAME = "baton-prefill", "baton-prefill.ns.svc.cluster.local."
HOSTS = ("127.0.0.2", "127.0.0.3")
RESOLV = f"nameserver {NAME_SERVER}\nsearch ns.svc.cluster.local\noptions timeout:1 attempts:1\n"


def can_give_a_process_its_own_files() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    mount = "mount --bind /dev/null /etc/resolv.conf"
    return not subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode


@dataclass
class Crowd:
    """Clients that ask one question after the other until they are told to stop. sources: the
    servers that computed their prompts, in the order of the answers."""

    sources: list[str] = field(default_factory=list)
    is_over: Event = field(default_factory=Event)

    def ask(self, node: Node, first: int) -> None:
        count = 0
        while not self.is_over.is_set():
            question = make_question(first + count % 50, 16)
            body: Body = {
                "text": question.prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": 32},
            }
            reply = reply_of(node.post("/generate", body))
            assert is_right(question, reply.text)
            self.sources.append(reply.timeline.peer)
            count += 1

    def wait_used(self, *nodes: Node) -> None:
        """Until each of these, and no other one, computed the prompts of the latest answers."""
        names = {node.bootstrap for node in nodes}
        start = len(self.sources)

        def are_used() -> bool:
            latest = self.sources[start:][-4 * CLIENT_COUNT :]
            return len(latest) >= CLIENT_COUNT and set(latest) == names

        wait_until(f"{names} to be used", are_used)


@contextmanager
def crowd(fleet: Fleet, node: Node) -> Iterator[Crowd]:
    """Every answer of it is right, and its server tried no transfer twice."""
    found = Crowd()
    before = node.info().counters
    asking: list[Future[None]] = [
        fleet.threads.submit(found.ask, node, 900 + 50 * index) for index in range(CLIENT_COUNT)
    ]
    try:
        yield found
    finally:
        found.is_over.set()
    for future in asking:
        future.result()
    after = node.info().counters
    for name in ("retried", "peers_lost"):
        assert after[name] == before[name], f"{name}: a transfer was cut"


def peers_of(node: Node) -> dict[str, dict[str, Any]]:
    return {peer["address"]: peer for peer in node.get("/peers").json()["peers"]}


def states_of(node: Node) -> dict[str, str]:
    return {address: peer["state"] for address, peer in peers_of(node).items()}


def write(path: Path, *nodes: Node) -> None:
    """Replaced at once, as an orchestrator does it."""
    new = path.with_suffix(".new")
    new.write_text("# prefill servers\n" + "".join(f"{node.bootstrap}\n" for node in nodes))
    new.rename(path)


def wait_states(node: Node, **expected: Node) -> None:
    wanted = {one.bootstrap: state for state, one in expected.items()}
    wait_until(f"{wanted}", lambda: states_of(node) == wanted)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


def test_servers_come_and_go_with_the_lines_of_a_file(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "peers"
    first, second = (fleet.prefill(*SLOW, name=name) for name in ("first", "second"))
    decode = fleet.decode(f"file:{path}", *SLOW, "--return-cache", "auto", "--name", "blue")
    for node in (first, second):
        node.wait_ready()
    wait_until("its workers", lambda: "workers are ready" in decode.log)
    wait_until("its health", lambda: f"file:{path}: can't be read" in decode.get("/health").text)
    write(path, first)
    decode.wait_ready()
    with crowd(fleet, decode) as clients:
        clients.wait_used(first)
        write(path, first, second)
        clients.wait_used(first, second)
        assert {one: peer["sources"] for one, peer in peers_of(decode).items()} == {
            node.bootstrap: [f"file:{path}"] for node in (first, second)
        }
        write(path, second)
        clients.wait_used(second)
        wait_states(decode, connected=second)
        assert "disconnected from decode server blue: removed" in first.log
        write(path, second, first)
        clients.wait_used(first, second)
    fleet.wait_at_rest()

    # What operators do comes on top.
    with crowd(fleet, decode) as clients:
        away = decode.delete("/peers", {"address": second.bootstrap})
        assert (away.status_code, away.json()["sources"]) == (200, [f"file:{path}"])
        clients.wait_used(first)
        wait_until(
            "it to be removed",
            lambda: (
                states_of(decode) == {first.bootstrap: "connected", second.bootstrap: "removed"}
            ),
        )
        assert decode.post("/peers", {"address": second.bootstrap}).status_code == 200
        clients.wait_used(first, second)
        sources = peers_of(decode)[second.bootstrap]["sources"]
        assert sources == [f"file:{path}", "admin"]
        write(path)
        clients.wait_used(second)
    assert first.refused("/peers", {"address": "a:1"}, 400).startswith("a prefill server dials")
    assert [peer["state"] for peer in peers_of(second).values()] == ["connected"]
    fleet.wait_at_rest()


@pytest.mark.skipif(
    not can_give_a_process_its_own_files(),
    reason="needs root and unshare, for a process with an /etc/resolv.conf of its own",
)
def test_servers_come_and_go_with_the_answers_of_a_name_server(
    fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "resolv.conf").write_text(RESOLV)
    mount = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
    (port,) = free_ports(1)
    nodes: list[Node] = []
    for host in HOSTS:
        node = fleet.prefill(*SLOW, name=f"prefill {host}", starts=False)
        node.host, node.bootstrap_port = host, port
        nodes.append(fleet.start(node))
    first, second = nodes
    decode = fleet.decode(f"dns:{NAME}:{port}", *SLOW, name="decode by name", starts=False)
    decode.prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    with NameServer(NAME_SERVER) as names:
        fleet.start(decode)
        for node in nodes:
            node.wait_ready()
        wait_until("a question", lambda: (FULL_NAME, "A") in names.asked)
        wait_until("another", lambda: (FULL_NAME, "AAAA") in names.asked)
        wait_until("its workers", lambda: "workers are ready" in decode.log)
        said = "names no prefill server"
        wait_until("its health", lambda: said in decode.get("/health").text)
        names.answers[FULL_NAME] = [first.host]
        decode.wait_ready()
        with crowd(fleet, decode) as clients:
            clients.wait_used(first)
            names.answers[FULL_NAME] = [first.host, second.host, "::1"]
            clients.wait_used(first, second)
            assert peers_of(decode)[f"[::1]:{port}"]["state"] != "connected"
            # A name server that forgets them, or answers nothing, ends nothing that works.
            del names.answers[FULL_NAME]
            wait_until("them to lapse", lambda: peers_of(decode)[first.bootstrap]["is_lapsed"])
            wait_until("the third to go", lambda: len(peers_of(decode)) == 2)
            clients.wait_used(first, second)
            names.is_failing = True
            said = f"dns:{NAME}:{port}: can't be looked up"
            wait_until("a failure", lambda: said in decode.log)
            clients.wait_used(first, second)
        second.kill()
        wait_states(decode, connected=first)
        names.is_failing = False
        names.answers[FULL_NAME] = [second.host, first.host]
        second.start().wait_ready()
        with crowd(fleet, decode) as clients:
            clients.wait_used(first, second)
            assert not peers_of(decode)[first.bootstrap]["is_lapsed"]
    assert decode.log.count("names no prefill server") == 2, "once for each time"
    fleet.wait_at_rest()
