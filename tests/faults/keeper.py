"""Restarts dead servers on the same ports, as a process supervisor of an operator would.

Knows nothing of why they died; counts how often, and what they left behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.servers import Part, Server, ServerPair

LOOK_INTERVAL_S = 0.1
# The kernel ends a server's processes with their parent; this is long for that.
LEFT_BEHIND_AFTER_S = 5.0


@dataclass(slots=True)
class Keeper:
    """Watches both servers of a pair from `start` to `stop`."""

    pair: ServerPair
    restart_counts: dict[str, int] = field(default_factory=dict)
    exit_codes: dict[str, list[int]] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    _pids: dict[str, dict[Part, int]] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Raises what the watch died of."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def forget(self) -> None:
        """Begin to count anew."""
        self.restart_counts.clear()
        self.exit_codes.clear()
        self.left_behind.clear()

    async def _watch(self) -> None:
        while True:
            for server in self.pair.servers:
                if server.is_running:
                    self._pids[server.role] = {
                        **self._pids.get(server.role, {}),
                        **server.pids(),
                    }
                else:
                    await self._restart(server)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _restart(self, server: Server) -> None:
        assert server.process is not None
        self.exit_codes.setdefault(server.role, []).append(server.process.returncode)
        await self._wait_gone(server.role)
        self._pids[server.role] = {}
        self.restart_counts[server.role] = self.restart_counts.get(server.role, 0) + 1
        server.start()

    async def _wait_gone(self, role: str) -> None:
        end_at = time.monotonic() + LEFT_BEHIND_AFTER_S
        while True:
            alive = [part for part, pid in self._pids.get(role, {}).items() if _is_alive(pid)]
            if not alive:
                return
            if time.monotonic() > end_at:
                self.left_behind += [f"{role} {part}" for part in alive]
                return
            await asyncio.sleep(LOOK_INTERVAL_S)


def _is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie, which is only an exit code kept for somebody."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
