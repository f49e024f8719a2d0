"""The end of a server: open requests end here, or go on at other servers.

    0            drain time / 2            drain time            + relay time
    ├─ what waits moves ──┤── what would be cut moves ──┤── relays end ──┤
    requests end here ──────────────────────────────────┤

Knows nothing of HTTP servers and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.clock import Clock
from common.config import Role, ServerConfig
from common.frontend.requests.fleet import Fleet
from common.frontend.requests.relay import Relays
from common.frontend.requests.request_handle import RequestHandle
from common.frontend.requests.scheduler_client import SchedulerClient

# A stream is taken to end here if it would in this share of the time that is left, by its pace.
ENDS_HERE_SHARE = 0.5


@dataclass(slots=True)
class DrainOrder:
    """What an administrator asked for. tell: has this server's first process begin the end of all,
    as a first SIGTERM does. leave: ends this frontend alone. must_move: open requests are to go on
    elsewhere. role: that the server is to go on in; None: it ends."""

    tell: Callable[[], None]
    leave: Callable[[], None]
    is_given: bool = field(default=False, init=False)
    must_move: bool = field(default=False, init=False)
    role: Role | None = field(default=None, init=False)

    def give(self) -> None:
        """Once: a second SIGTERM would end the server at once."""
        if not self.is_given:
            self.is_given = True
            self.tell()

    def give_role(self, role: Role) -> None:
        """The server drains and goes on in a role. Not after another order."""
        assert not self.is_given
        self.is_given = self.must_move = True
        self.role = role
        self.leave()


class Drain:
    """The last task of a frontend."""

    def __init__(
        self,
        config: ServerConfig,
        client: SchedulerClient,
        relays: Relays,
        fleet: Fleet,
        clock: Clock,
    ) -> None:
        self._config = config
        self._client = client
        self._relays = relays
        self._fleet = fleet
        self._clock = clock

    async def run(self, *, must_move: bool) -> None:
        """Until nothing is open any more, or what is open has to be cut off.

        must_move: somebody asked for it; it is done anyway if there is time for relays.
        """
        moves = must_move or self._config.relay_timeout_s > 0
        moves = moves and self._config.role is Role.DECODE
        end_at = self._clock.now() + self._config.drain_timeout_s
        self._client.begin_drain()
        if moves:
            self._relays.may_go_on_here = True
            await self._move(_waits)
            if await self._client.wait_ended((end_at - self._clock.now()) / 2):
                return
            await self._move(lambda handle: self._would_be_cut(handle, end_at))
        if await self._client.wait_ended(end_at - self._clock.now()):
            return
        self._relays.may_go_on_here = False
        self._client.stop_own()
        await self._client.wait_ended(self._config.relay_timeout_s)

    async def _move(self, chosen: Callable[[RequestHandle], bool]) -> None:
        """Nothing is interrupted if nobody is there to go on with it."""
        await self._fleet.look()
        if not self._fleet.servers:
            return
        for handle in self._client.open_requests:
            if not handle.is_relayed and not handle.is_cancelled and chosen(handle):
                self._relays.move(handle)

    def _would_be_cut(self, handle: RequestHandle, end_at: float) -> bool:
        """Whether it seems not to end here in time, by its pace so far."""
        now, count = self._clock.now(), len(handle.output_ids)
        if not count:
            return _waits(handle)
        left_count = handle.asked.sampling.max_new_tokens - count
        pace_s = (now - handle.started_at) / count
        return left_count * pace_s > ENDS_HERE_SHARE * (end_at - now)


def _waits(handle: RequestHandle) -> bool:
    """Whether nothing has come of a request, and nobody waits for it in a room: a router takes the
    end of one half for the end of both."""
    bootstrap = handle.asked.bootstrap
    return not handle.output_ids and (bootstrap is None or bool(bootstrap.engine))
