"""`python -m tests.churn --clients 16 --rounds 1`: two prefill and two decode servers under load,
while their roles are switched back and forth, each is drained and started anew, and the scheduler
of each is killed.

Clients do what a router does: a request that was refused before its first token goes to another
server. Exit code 0 if every answer was right, none failed or hung, and no page is held at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread

import httpx
import msgspec

from tests.e2e.fleet import Body, Fleet, Node, wait_until
from tests.e2e.replies import Reply
from tests.e2e.test_moves import GAP_MIN, GREEDY, TOLD, gap_of

FLAGS = (
    *("--enable-role-switch", "--serve-plain", "--dtype", "float32"),
    *("--drain-timeout", "1", "--relay-timeout", "60", "--page-size", "16"),
)
CANDIDATE_COUNT = 48
OUTPUT_TOKENS = (8, 120)
# What a client waits for its answer; nothing here takes a tenth of it.
PATIENCE_S = 60.0
RETRY_S = 0.05
# Between two strokes, for requests that begin on servers as they are then.
CALM_S = 2.0
RESTING_SWITCHES = 5


@dataclass
class Tally:
    """What became of requests. late: seconds of the slowest one."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def note(self, verdict: str, took_s: float, problem: str = "") -> None:
        with self.lock:
            self.counts[verdict] += 1
            self.slowest_s = max(self.slowest_s, took_s)
            if problem:
                self.problems.append(problem)


@dataclass
class Client:
    """One at a time, from any server."""

    nodes: list[Node]
    answers: list[tuple[Body, list[int]]]
    tally: Tally
    rng: random.Random
    has_ended: Event

    def run(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self.has_ended.is_set():
                body, expected = self.rng.choice(self.answers)
                began_at = time.monotonic()
                try:
                    verdict, problem = self._ask(http, body, expected)
                except (ValueError, msgspec.MsgspecError) as error:
                    verdict, problem = "failed", f"{type(error).__name__}: {error}"
                took_s = time.monotonic() - began_at
                if took_s > PATIENCE_S:
                    verdict, problem = "hung", f"{took_s:.0f} s: {problem}"
                self.tally.note(verdict, took_s, problem)

    def _ask(self, http: httpx.Client, body: Body, expected: list[int]) -> tuple[str, str]:
        """A verdict, and what is wrong."""
        end_at = time.monotonic() + PATIENCE_S
        why = ""
        while time.monotonic() < end_at:
            node = self.rng.choice(self.nodes)
            got: list[int] = []
            try:
                with http.stream("POST", f"{node.url}/generate", json=body) as response:
                    if response.status_code == 503:
                        why = response.read().decode()
                    elif response.status_code != 200:
                        return "failed", f"{node.name}: {response.read().decode()}"
                    else:
                        last = None
                        for line in response.iter_lines():
                            payload = line.removeprefix("data: ")
                            if payload.startswith("{"):
                                last = msgspec.json.decode(payload, type=Reply)
                                got = last.output_ids
                        finish = last.meta_info.finish_reason if last is not None else None
                        if finish is None or finish.type == "abort":
                            return "failed", f"{node.name}: ended after {len(got)}: {finish}"
                        right = got == expected
                        return ("right", "") if right else ("wrong", f"{node.name}: {body}")
            except httpx.TransportError as error:
                why = f"{node.name}: {error!r}"
                if got:
                    return "failed", f"cut off after {len(got)} tokens: {why}"
            self.tally.note("sent elsewhere", 0.0)
            time.sleep(RETRY_S)
        return "failed", f"no server took it: {why}"


def golden(fleet: Fleet, node: Node, rng: random.Random) -> list[tuple[Body, list[int]]]:
    """Bodies whose greedy answer does not hang on the last bit of a logit."""
    bodies: list[Body] = [
        {
            "text": f"Facts number {place}:",
            "sampling_params": GREEDY | {"max_new_tokens": rng.randint(*OUTPUT_TOKENS)},
        }
        for place in range(CANDIDATE_COUNT)
    ]
    found = [(body, node.generate(body | TOLD)) for body in bodies]
    clear = [(body, reply.output_ids) for body, reply in found if gap_of(reply) > GAP_MIN]
    assert len(clear) >= CANDIDATE_COUNT // 4
    return [(body | {"stream": True}, output_ids) for body, output_ids in clear]


def wait_serving(node: Node, role: str) -> None:
    def is_serving() -> bool:
        try:
            return node.get("/health").status_code == 200 and node.role == role
        except httpx.TransportError:
            return False

    wait_until(f"{node.name} to serve as a {role} server", is_serving)


def switch(node: Node, role: str) -> float:
    """Seconds until it serves in a role."""
    began_at = time.monotonic()
    node.switch(role)
    wait_serving(node, role)
    return time.monotonic() - began_at


def restart(node: Node) -> float:
    """Drain a server by SIGTERM and start it anew. Seconds until it is ready again."""
    began_at = time.monotonic()
    assert node.terminate() == 0, node.log[-2000:]
    node.start().wait_ready()
    return time.monotonic() - began_at


def kill_scheduler(node: Node) -> float:
    """Seconds until it is ready again."""
    role, began_at = node.role, time.monotonic()
    pid = node.process_id_of("scheduler_process")
    os.kill(pid, signal.SIGKILL)
    wait_until("another scheduler", lambda: pid not in node.process_ids())
    wait_serving(node, role)
    return time.monotonic() - began_at


def strokes(prefills: list[Node], decodes: list[Node]) -> list[tuple[str, Callable[[], float]]]:
    """What happens in a round, in turn."""
    found: list[tuple[str, Callable[[], float]]] = []
    for node, own, other in (
        *((one, "prefill", "decode") for one in prefills),
        *((one, "decode", "prefill") for one in decodes),
    ):
        found += [
            (f"{node.name} becomes a {other} server", lambda n=node, r=other: switch(n, r)),
            (f"{node.name} becomes a {own} server", lambda n=node, r=own: switch(n, r)),
            (f"{node.name} is drained and started anew", lambda n=node: restart(n)),
            (f"the scheduler of {node.name} is killed", lambda n=node: kill_scheduler(n)),
        ]  # fmt: skip
    return found


def start(fleet: Fleet) -> tuple[list[Node], list[Node], Node]:
    """Prefill servers, decode servers, and one that computes alone."""
    prefills = [fleet.prefill(*FLAGS, name=f"p{i}", starts=False) for i in range(2)]
    decodes = [fleet.decode("none", *FLAGS, name=f"d{i}", starts=False) for i in range(2)]
    everywhere = ",".join(node.bootstrap for node in (*prefills, *decodes))
    for node in (*prefills, *decodes):
        node.add_flags("--prefill", everywhere)
        fleet.start(node)
    alone = fleet.decode([], "--dtype", "float32", name="alone")
    fleet.wait_ready()
    return prefills, decodes, alone


def run(directory: Path, client_count: int, round_count: int, seed: int) -> int:
    rng, tally, has_ended = random.Random(seed), Tally(), Event()
    with Fleet(directory) as fleet:
        prefills, decodes, alone = start(fleet)
        nodes = [*prefills, *decodes]
        answers = golden(fleet, alone, rng)
        clients = [
            Client(nodes, answers, tally, random.Random(rng.random()), has_ended)
            for _ in range(client_count)
        ]
        threads = [Thread(target=client.run, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        try:
            for _ in range(round_count):
                for what, stroke in strokes(prefills, decodes):
                    time.sleep(CALM_S)
                    took_s = stroke()
                    print(f"{what:44} {took_s:6.1f} s  {dict(tally.counts)}", flush=True)
            time.sleep(CALM_S)
        finally:
            has_ended.set()
            for thread in threads:
                thread.join(2 * PATIENCE_S)
        fleet.wait_at_rest()
        at_rest = [
            switch(decodes[0], role)
            for _ in range(RESTING_SWITCHES)
            for role in ("prefill", "decode")
        ]
    for problem in tally.problems[:20]:
        print(f"  {problem[:300]}")
    print(
        f"{dict(tally.counts)}; the slowest took {tally.slowest_s:.1f} s; switches at rest: median "
        f"{statistics.median(at_rest):.2f} s, most {max(at_rest):.2f} s"
    )
    is_well = not tally.problems and tally.counts["right"] > 0
    print("churn passed" if is_well else "churn FAILED")
    return 0 if is_well else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.churn", description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        return run(Path(directory), given.clients, given.rounds, given.seed)


if __name__ == "__main__":
    sys.exit(main())
