"""Freezes parts of a pair again and again while it is soaked, and at times kills a server of it.

It is always the prefill server: the decode server's processes live on through all of it, so that
what they hold can be compared.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from dataclasses import dataclass

from tests.faults.keeper import Keeper
from tests.soak.servers import Part, Server, ServerPair, send_signal

FREEZE_S = (2.0, 6.0)
# Every so many freezes, the prefill server loses its worker, which ends it.
FREEZES_PER_KILL = 4


@dataclass(slots=True)
class Troubles:
    """interval_s: from one fault to the next, on average."""

    pair: ServerPair
    interval_s: float
    seed: int
    freeze_count: int = 0
    kill_count: int = 0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Troubles:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Whoever is frozen is thawed, who was killed is back. Raises what the task died of."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
        for server in self.pair.servers:
            await server.wait_ready()

    async def _run(self) -> None:
        rng = random.Random(f"troubles {self.seed}")
        keeper = Keeper(self.pair)
        keeper.start()
        try:
            for turn in itertools.count(1):
                await asyncio.sleep(rng.uniform(0.5, 1.5) * self.interval_s)
                if turn % (FREEZES_PER_KILL + 1):
                    server = rng.choice(self.pair.servers)
                    await self._freeze(server, rng.choice(list(Part)), rng.uniform(*FREEZE_S))
                else:
                    self._kill(self.pair.prefill)
        finally:
            await keeper.stop()

    async def _freeze(self, server: Server, part: Part, duration_s: float) -> None:
        pid = server.pids().get(part)
        if pid is None:
            return  # it is being started
        self.freeze_count += 1
        send_signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(duration_s)
        finally:
            send_signal(pid, signal.SIGCONT)

    def _kill(self, server: Server) -> None:
        pid = server.pids().get(Part.WORKER)
        if pid is None:
            return
        self.kill_count += 1
        send_signal(pid, signal.SIGKILL)
