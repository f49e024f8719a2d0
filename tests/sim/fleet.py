"""Many servers of both roles, each with each, under more load than they can carry.

`python -m tests.sim --fleet` tells what became of the largest one, and what its schedulers took.
"""

from __future__ import annotations

import gc
import time
from collections import Counter

from common.protocol.frontend import Failed
from common.scheduling.events import Effect, Event, ToFrontend
from common.scheduling.facts import Pace
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.node import Node
from tests.sim.verdict import judge
from tests.sim.world import World

PROMPT_TOKENS = 24
CHUNK_TOKENS = 24  # as simulated servers have it
STEP_S = 0.0105  # on average
# Of the largest one, whose 4096 pairs would else exchange nothing but heartbeats. What a prefill
# server has to do is known from them: work that lasts no longer than a few is spread less evenly.
LARGE_SIZE = 64
LARGE_PACE = Pace(interval_s=0.8, timeout_s=3.2)
LARGE_QUEUE_MAX = 32  # of a prefill server; of all of them as many as wait
LARGE_WAITING_COUNT = 2000
# What tests have time for.
MIDDLE_SIZE = 16
MIDDLE_WAITING_COUNT = 750
LARGE_BUDGET_S = 8.0
EVENT_MAX_MS = 2.0


class Fleet:
    """As many decode servers as prefill servers, all at rest at time 4.

    refused: how full the prefill queues were whenever a client was refused. event_s: by role, what
    each event took its scheduler, if that is measured.
    """

    def __init__(
        self,
        size: int,
        queue_max: int,
        decode_queue_max: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.world = World(seed=1)
        self.world.watches_order = False
        self.size, self.queue_max = size, decode_queue_max or queue_max
        names = [f"p{index}" for index in range(size)]
        for name in names:
            self.world.add(name, "prefill", 8, 1000)
        for index in range(size):
            node = self.world.add(f"d{index}", "decode", 8, 2000)
            node.links, node.running_max = [f"{name}:1" for name in names], 32
        for node in self.world.nodes.values():
            node.queue_max = queue_max if node.role == "prefill" else self.queue_max
            node.pace = pace or node.pace
        self.world.begin(rest_at=4.0)
        self.refused: Counter[int] = Counter()
        self.event_s: dict[str, list[float]] = {"prefill": [], "decode": []}
        self.world.watchers.append(self._note_refused)

    def _note_refused(self, node: Node, effect: Effect) -> None:
        message = effect.message if isinstance(effect, ToFrontend) else None
        if not isinstance(message, Failed) or message.status != 503:
            return
        core = node.core
        assert isinstance(core, DecodeScheduler), "a prefill server refuses nobody"
        assert len(core.requests.queue) >= self.queue_max, f"{node.name} has room in its own queue"
        self.refused[min(self.queued_counts)] += 1

    @property
    def prefills(self) -> list[PrefillScheduler]:
        cores = [node.core for node in self.world.nodes.values()]
        return [core for core in cores if isinstance(core, PrefillScheduler)]

    @property
    def decodes(self) -> list[Node]:
        return [node for node in self.world.nodes.values() if node.role == "decode"]

    @property
    def queued_counts(self) -> list[int]:
        return [len(core.requests) for core in self.prefills]

    @property
    def waiting_count(self) -> int:
        """Requests that have not been computed, wherever they wait."""
        cores = [node.core for node in self.decodes]
        here = sum(len(core.requests.queue) for core in cores)
        return here + sum(len(core.requests.queue) for core in self.prefills)

    @property
    def finished_counts(self) -> list[float]:
        return [core.requests.counters["finished"] for core in self.prefills]

    def load(self, overload: float, load_s: float, budget_s: float) -> None:
        """Requests at equal distances, to each decode server in turn. overload: how many times what
        the prefill servers compute."""
        rate = overload * self.size * CHUNK_TOKENS / PROMPT_TOKENS / STEP_S
        for index in range(round(rate * load_s)):
            self.submit(index, budget_s)
            self.world.run(self.world.now + 1 / rate)

    def submit(self, index: int, budget_s: float) -> None:
        node = self.world.nodes[f"d{index % self.size}"]
        prompt = [index, *range(10, 10 + PROMPT_TOKENS - 1)]
        self.world.submit(node, prompt, 2, budget_s=budget_s)

    def measure(self) -> None:
        """From now on, note the processor time that each event takes its scheduler, the decision
        after it included."""
        for node in self.world.nodes.values():
            self._measure(node, self.event_s[node.role])

    @staticmethod
    def _measure(node: Node, event_s: list[float]) -> None:
        core = node.core
        handle, schedule = core.handle, core.schedule
        spent_s = 0.0

        def handle_timed(event: Event, now: float) -> list[Effect]:
            nonlocal spent_s
            began_at = time.thread_time()
            effects = handle(event, now)
            spent_s += time.thread_time() - began_at
            return effects

        def schedule_timed(now: float) -> list[Effect]:
            nonlocal spent_s
            began_at = time.thread_time()
            effects = schedule(now)
            event_s.append(spent_s + time.thread_time() - began_at)
            spent_s = 0.0
            return effects

        core.handle = handle_timed  # type: ignore[method-assign]
        core.schedule = schedule_timed  # type: ignore[method-assign]


def fleet_of(size: int, pace: Pace | None = None) -> Fleet:
    return Fleet(size, LARGE_QUEUE_MAX, 2 * LARGE_WAITING_COUNT, pace)


def play(fleet: Fleet, waiting_count: int) -> tuple[list[float], Counter[str]]:
    """Requests that come all at once: as many to one decode server as to all others, until all have
    ended. Returns how many each prefill server computed, and how requests failed."""
    before = fleet.finished_counts
    for index in range(waiting_count):
        fleet.submit(index, LARGE_BUDGET_S)
        fleet.submit(fleet.size * (waiting_count + index), LARGE_BUDGET_S)
    fleet.world.run(fleet.world.now + 0.02)  # until what was asked has come
    assert fleet.waiting_count >= waiting_count, fleet.waiting_count
    fleet.world.run(fleet.world.now + LARGE_BUDGET_S + 1.0)
    judge(fleet.world)
    clients = fleet.world.clients.values()
    failures = Counter(client.failure.partition(":")[0] for client in clients if client.failure)
    counts = zip(fleet.finished_counts, before, strict=True)
    return [after - then for after, then in counts], failures


def tell_large() -> int:
    """Print what became of the largest fleet; 1 if the work was uneven or a request failed. What
    events took is told beside its limit and decides nothing: it is another on a busy machine."""
    began_at = time.monotonic()
    fleet = fleet_of(LARGE_SIZE, LARGE_PACE)
    gc.collect()
    gc.freeze()  # all servers are in one process here, and its collector would look at each
    fleet.measure()
    shares, failures = play(fleet, LARGE_WAITING_COUNT)
    mean = sum(shares) / len(shares)
    print(f"{LARGE_SIZE} x {LARGE_SIZE} servers, {len(fleet.world.clients)} requests at once:")
    print(f"  prompts of each prefill server: {min(shares):.0f}..{max(shares):.0f} of {mean:.1f}")
    print(f"  requests that failed: {dict(failures) or 'none'}")
    for role, event_s in fleet.event_s.items():
        ordered = sorted(event_s)
        p50, p99 = (1e3 * ordered[int(share * len(ordered))] for share in (0.5, 0.99))
        print(
            f"  {role} scheduler, {len(ordered)} events: median {p50:.2f} ms, p99 {p99:.2f} ms "
            f"(limit {EVENT_MAX_MS:g}), longest {1e3 * ordered[-1]:.1f} ms"
        )
    print(f"  told in {time.monotonic() - began_at:.0f} s")
    is_even = 0.8 * mean <= min(shares) and max(shares) <= 1.2 * mean
    return 0 if is_even and not failures else 1
