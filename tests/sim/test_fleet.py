"""A fleet under three times the load that it can carry: nobody is refused while there is room."""

from __future__ import annotations

from collections import Counter

import pytest

from common.protocol.frontend import Failed
from common.scheduling.events import Effect, ToFrontend
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.node import Node
from tests.sim.verdict import judge
from tests.sim.world import World

SIZE = 8
QUEUE_MAX = 64
PROMPT_TOKENS = 24
CHUNK_TOKENS = 24  # as simulated servers have it
STEP_S = 0.0105  # on average
OVERLOAD = 3
LOAD_S = 2.5
BUDGET_S = 6.0
# Places in a queue that a message about them is on its way for.
ON_ITS_WAY_COUNT = 8


class Fleet:
    """As many decode servers as prefill servers, each with each, at rest at time 4.

    refused: how full the prefill queues were whenever a client was refused.
    """

    def __init__(self, size: int) -> None:
        self.world = World(seed=1)
        self.size = size
        names = [f"p{index}" for index in range(size)]
        for name in names:
            self.world.add(name, "prefill", 8, 1000)
        for index in range(size):
            node = self.world.add(f"d{index}", "decode", 8, 2000)
            node.links, node.running_max = [f"{name}:1" for name in names], 32
        for node in self.world.nodes.values():
            node.queue_max = QUEUE_MAX
        self.world.begin(rest_at=4.0)
        self.refused: Counter[int] = Counter()
        self.world.watchers.append(self._note_refused)

    def _note_refused(self, node: Node, effect: Effect) -> None:
        message = effect.message if isinstance(effect, ToFrontend) else None
        if not isinstance(message, Failed) or message.status != 503:
            return
        core = node.core
        assert isinstance(core, DecodeScheduler), "a prefill server refuses nobody"
        assert len(core.requests.queue) >= QUEUE_MAX, f"{node.name} has room in its own queue"
        self.refused[min(self.queued_counts)] += 1

    @property
    def prefills(self) -> list[PrefillScheduler]:
        cores = [node.core for node in self.world.nodes.values()]
        return [core for core in cores if isinstance(core, PrefillScheduler)]

    @property
    def queued_counts(self) -> list[int]:
        return [len(core.requests) for core in self.prefills]

    def load(self) -> None:
        """Requests at equal distances, to each decode server in turn."""
        rate = OVERLOAD * self.size * CHUNK_TOKENS / PROMPT_TOKENS / STEP_S
        for index in range(round(rate * LOAD_S)):
            node = self.world.nodes[f"d{index % self.size}"]
            prompt = [index, *range(10, 10 + PROMPT_TOKENS - 1)]
            self.world.submit(node, prompt, 2, budget_s=BUDGET_S)
            self.world.run(self.world.now + 1 / rate)


@pytest.mark.slow
def test_under_three_times_the_load_nobody_is_refused_while_there_is_room() -> None:
    fleet = Fleet(SIZE)
    before = [core.requests.counters["finished"] for core in fleet.prefills]
    fleet.load()
    fleet.world.run(fleet.world.now + BUDGET_S + 1.0)
    judge(fleet.world)
    failures = Counter(client.failure.partition(":")[0] for client in fleet.world.clients.values())
    assert set(failures) == {"", "queue_full"}
    assert fleet.refused.total() == failures["queue_full"] > 0
    assert min(fleet.refused) >= QUEUE_MAX - ON_ITS_WAY_COUNT, fleet.refused
    finished = [core.requests.counters["finished"] for core in fleet.prefills]
    shares = [after - then for after, then in zip(finished, before, strict=True)]
    mean = sum(shares) / SIZE
    assert 0.8 * mean <= min(shares) and max(shares) <= 1.2 * mean, shares
    assert mean >= 0.9 * LOAD_S / STEP_S, "no server was idle meanwhile"
