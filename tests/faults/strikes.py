"""Inflicts one fault on a pair, at a moment at which some request is where the fault aims.

The worker of the server that is struck is stopped, and while nothing moves there, the schedulers
are asked what is under way. If it is not the right moment, the worker goes on as if nothing had
been; else the fault strikes at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import httpx
import msgspec

from tests.faults.cases import Act, Fault, Phase
from tests.faults.isolation import SHARED_MEMORY, FarHosts, fill, make_room
from tests.soak.clients import Load
from tests.soak.plans import Side
from tests.soak.servers import Look, Part, Server, ServerPair, send_signal

LASTS_S = (1.0, 4.0)
# On a link whose packets come late, a cut that is shorter than what is given up is none.
CUT_LASTS_S = (3.0, 6.0)
# A server comes back before it shakes hands; everything else happens all the time.
AIM_TIMEOUTS_S = {Phase.HANDSHAKE: 60.0}
AIM_TIMEOUT_S = 2.0
# Between two looks: long enough for those who were stopped to get somewhere.
AIM_PAUSE_S = (0.002, 0.02)
LOOK_TIMEOUT_S = 0.5
# States of a peer that is neither strange nor connected, on either side.
SHAKING_STATES = {Side.PREFILL: ("connecting", "attaching"), Side.DECODE: ("opening", "attaching")}


@dataclass(slots=True)
class Striker:
    """strike_counts: faults that struck when something was in that phase, over all cases.
    hosts: between which the link can be cut."""

    pair: ServerPair
    strike_counts: Counter[Phase]
    hosts: FarHosts | None = None
    _http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=None))

    async def __aenter__(self) -> Striker:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def strike(self, fault: Fault, load: Load, rng: random.Random) -> None:
        """Until it is over."""
        lasts_s = rng.uniform(*(CUT_LASTS_S if fault.act is Act.CUT else LASTS_S))
        await asyncio.sleep(fault.after_s)
        if fault.parts:
            await self._strike_processes(fault, load, rng, lasts_s)
            return
        self._note(await self._look(load))
        match fault.act:
            case Act.CUT:
                assert self.hosts is not None
                await self.hosts.cut()
                await asyncio.sleep(lasts_s)
                await self.hosts.heal()
            case Act.FILL_DISK | Act.FILL_MEMORY:
                full = self.pair.log_dir if fault.act is Act.FILL_DISK else SHARED_MEMORY
                try:
                    await asyncio.to_thread(fill, full)
                    await asyncio.sleep(lasts_s)
                finally:
                    make_room(full)
            case _:
                raise AssertionError(f"{fault.act} strikes processes")

    async def _strike_processes(
        self, fault: Fault, load: Load, rng: random.Random, lasts_s: float
    ) -> None:
        worker = await self._catch(fault, load, rng)
        pids = _pids(self.pair.server(fault.side), fault.parts)
        try:
            if fault.act is not Act.RESTART:
                _signal_all(pids, signal.SIGSTOP)
        finally:
            if fault.act not in (Act.KILL, Act.FREEZE) or worker not in pids:
                send_signal(worker, signal.SIGCONT)
        match fault.act:
            case Act.KILL:
                _signal_all(pids, signal.SIGKILL)
            case Act.RESTART:
                _signal_all(pids, signal.SIGTERM)
            case Act.FREEZE:
                await asyncio.sleep(lasts_s)
                _signal_all(pids, signal.SIGCONT)
            case Act.STARVE:
                limits = [(pid, *_limit_files(pid)) for pid in pids]
                _signal_all(pids, signal.SIGCONT)
                await asyncio.sleep(lasts_s)
                for pid, soft, hard in limits:
                    # One that could not bear it is found missing later.
                    with suppress(ProcessLookupError):
                        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            case _:
                raise AssertionError(f"{fault.act} strikes no process")

    async def _catch(self, fault: Fault, load: Load, rng: random.Random) -> int:
        """The server's worker, stopped while something is in the phase that the fault aims at, or
        where it was hit least so far, if that comes soon."""
        aim = fault.aim or min(
            (phase for phase in Phase if phase is not Phase.HANDSHAKE),
            key=lambda phase: (self.strike_counts[phase], rng.random()),
        )
        end_at = time.monotonic() + AIM_TIMEOUTS_S.get(aim, AIM_TIMEOUT_S)
        while True:
            server = self.pair.server(fault.side)
            pids = server.pids()
            if all(part in pids for part in (Part.WORKER, *fault.parts)):
                send_signal(pids[Part.WORKER], signal.SIGSTOP)
                moment = await self._look(load)
                if moment[aim] or time.monotonic() > end_at:
                    self._note(moment)
                    return pids[Part.WORKER]
                send_signal(pids[Part.WORKER], signal.SIGCONT)
            elif time.monotonic() > end_at + AIM_TIMEOUTS_S[Phase.HANDSHAKE]:
                raise AssertionError(f"{server.role} has only {pids}")
            await asyncio.sleep(rng.uniform(*AIM_PAUSE_S))

    async def _look(self, load: Load) -> Counter[Phase]:
        """How many are in each phase."""
        looks = await asyncio.gather(*(self._ask(self.pair.server(side)) for side in Side))
        moment: Counter[Phase] = Counter({Phase.SETTLED: load.begun_count})
        for side, look in zip(Side, looks, strict=True):
            if look is None:
                continue
            queues = Counter(look.queues)
            moment[Phase.HANDSHAKE] += sum(p.state in SHAKING_STATES[side] for p in look.peers)
            moment[Phase.RESERVE] += queues["waiting"] + queues["bootstrap"]
            if side is Side.PREFILL:
                moment[Phase.PREFILL] += queues["running"]
                moment[Phase.TRANSFER] += queues["inflight"]
                moment[Phase.RETURN] += queues["returning"]
            else:
                moment[Phase.DECODE] += queues["running"]
        return moment

    async def _ask(self, server: Server) -> Look | None:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                response = await self._http.get(f"{server.url}/server_info")
        except (TimeoutError, httpx.TransportError):
            return None
        look = msgspec.json.decode(response.content, type=Look)
        return look if look.is_state_fresh else None

    def _note(self, moment: Counter[Phase]) -> None:
        self.strike_counts.update(phase for phase in Phase if moment[phase])


def _pids(server: Server, parts: tuple[Part, ...]) -> list[int]:
    """The supervisor first: what it does not see, it does not act on."""
    pids = server.pids()
    return [pids[part] for part in parts if part in pids]


def _limit_files(pid: int) -> tuple[int, int]:
    """Let a process open not one more file; the limits that it had."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Descriptors are given out from below: the limit is on the highest, not on how many.
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(fd for fd in range(len(used) + 1) if fd not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    return soft, hard


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        send_signal(pid, number)
