"""Concurrent clients of a pair: they send what was planned and keep what each answer was worth.

Knows nothing of server processes; a server that is down is an answer of its own kind.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from tests.soak.golden import Golden
from tests.soak.plans import NO_MIX, Mix, Plan, Side, Twist, draw_plans
from tests.soak.verdicts import Half, Verdict, judge

DONE = "[DONE]"
# A client that finds nobody listening does not ask again at once.
UNREACHABLE_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """Where the pair listens. hang_after_s: an answer that takes longer counts as none."""

    urls: dict[Side, str]
    bootstrap: tuple[str, int]
    hang_after_s: float
    keeps_connections: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds of the monotonic clock."""

    plan: Plan
    sent_at: float
    ended_at: float
    verdict: Verdict
    detail: str


@dataclass(slots=True)
class Load:
    """`client_count` clients, each with one request at a time, from `start` to `stop`."""

    target: Target
    goldens: Sequence[Golden]
    seed: int
    client_count: int
    mix: Mix = NO_MIX
    answers: list[Answer] = field(default_factory=list)
    sent_count: int = 0
    _open: dict[str, dict[Side, Half]] = field(default_factory=dict)
    _is_stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run_client(index)) for index in range(self.client_count)
        ]

    async def stop(self) -> None:
        """Send nothing more and wait for what is open, which is bounded by hang_after_s."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises what a client died of: a mistake of the harness, not of the pair."""
        for task in self._tasks:
            if task.done():
                task.result()

    def counts(self, since: float = 0.0) -> Counter[Verdict]:
        """Answers by verdict, of requests sent at `since` or later."""
        return Counter(answer.verdict for answer in self.answers if answer.sent_at >= since)

    @property
    def begun_count(self) -> int:
        """Streams that have brought their first token and no more."""
        halves = [halves[Side.DECODE] for halves in self._open.values()]
        return sum(half.event_count == 1 and not half.is_ended for half in halves)

    async def _run_client(self, index: int) -> None:
        # Connections are given up before the server (5 s) would: a post may not cross its close.
        kept_count = 4 if self.target.keeps_connections else 0
        limits = httpx.Limits(max_keepalive_connections=kept_count, keepalive_expiry=2.0)
        async with httpx.AsyncClient(timeout=None, limits=limits) as http:
            for plan in draw_plans(self.seed, index, self.goldens, self.mix):
                await asyncio.sleep(plan.think_s)
                if self._is_stopping:
                    return
                answer = await self._send(http, plan)
                self.answers.append(answer)
                if answer.verdict is Verdict.UNREACHABLE:
                    await asyncio.sleep(UNREACHABLE_PAUSE_S)

    async def _send(self, http: httpx.AsyncClient, plan: Plan) -> Answer:
        sent_at = time.monotonic()
        self.sent_count += 1
        halves = {side: Half(plan.sample_count) for side in plan.sides}
        aborts = plan.twisted_sides if plan.twist is Twist.ABORT else ()
        self._open[plan.rid] = halves
        async with asyncio.TaskGroup() as tasks:
            for place, side in enumerate(plan.sides):
                delay_s = place * plan.gap_s
                tasks.create_task(self._send_half(http, plan, side, halves[side], delay_s))
            for side in aborts:
                tasks.create_task(self._abort(http, plan, side))
        del self._open[plan.rid]
        verdict, detail = judge(plan, halves)
        return Answer(plan, sent_at, time.monotonic(), verdict, detail)

    async def _send_half(
        self, http: httpx.AsyncClient, plan: Plan, side: Side, half: Half, delay_s: float
    ) -> None:
        """Post to one side and gather into `half` whatever comes, to the end or the planned cut."""
        is_leaving = plan.twist is Twist.DISCONNECT and side in plan.twisted_sides
        leaves_by_time = is_leaving and not (plan.is_streaming and side is Side.DECODE)
        limit_s = plan.after_s if leaves_by_time else self.target.hang_after_s
        await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(http, plan, side, half, is_leaving=is_leaving)
        except TimeoutError:
            is_hang = not leaves_by_time
            kind = Verdict.HANG if is_hang else Verdict.ABORTED
            half.trouble = (kind, f"{side}: no end in {limit_s:g} s" if is_hang else "")
        except (httpx.ConnectError, httpx.ConnectTimeout):
            half.trouble = (Verdict.UNREACHABLE, f"{side} does not listen")
        except httpx.TransportError as error:
            # The kernel resets a connection whose server has closed it without reading it all.
            is_unread = half.status == 0 and isinstance(error, httpx.ReadError)
            kind = Verdict.UNREACHABLE if is_unread else Verdict.CUT
            half.trouble = (kind, f"{side} {type(error).__name__}")
        except msgspec.DecodeError as error:
            half.trouble = (Verdict.WRONG, f"{side}: {error}")

    async def _exchange(
        self, http: httpx.AsyncClient, plan: Plan, side: Side, half: Half, *, is_leaving: bool
    ) -> None:
        body = plan.body(self.target.bootstrap)
        url = self.target.urls[side] + plan.api
        async with http.stream("POST", url, json=body) as response:
            half.status = response.status_code
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            if not is_stream:
                half.take(await response.aread(), is_event=False)
                return
            async for line in response.aiter_lines():
                if not line:
                    continue
                content = line.removeprefix("data: ")
                if content == DONE:
                    half.is_closed = True
                    continue
                half.take(content, is_event=True)
                if is_leaving and side is Side.DECODE and half.event_count >= plan.after_events:
                    half.trouble = (Verdict.ABORTED, "")
                    return
            if not half.is_closed:
                half.trouble = (Verdict.WRONG, f"{side}: a stream ended without {DONE}")

    async def _abort(self, http: httpx.AsyncClient, plan: Plan, side: Side) -> None:
        """Whether the abort finds the request is not known; it must be answered."""
        await asyncio.sleep(plan.after_s)
        try:
            async with asyncio.timeout(self.target.hang_after_s):
                url = f"{self.target.urls[side]}/abort_request"
                await http.post(url, json={"rid": plan.rid})
        except (httpx.TransportError, TimeoutError):
            pass  # what it was meant for says whether the server is there
