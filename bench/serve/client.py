"""Sends a workload when it is due, and notes when each token came.

The schedule is open: a request leaves at its time however slow the answers to others are. Only
--max-concurrency holds requests back, and says so in its own number. Where this process itself is
late, because it has more to do than one core can, that is measured too.

Sessions are open beside each other and closed within: a turn is due when the answer before it has
ended and its think time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import aiohttp
import msgspec

from bench.serve.conversation import Conversation
from bench.serve.dialects import Dialect
from bench.serve.outcome import Outcome, Run
from bench.serve.sessions import PromptSource, Session, turn_count
from bench.serve.settings import Settings
from bench.serve.workload import Ask

LAG_INTERVAL_S = 0.01
CONNECT_TIMEOUT_S = 30.0
DONE = b"[DONE]"
END_OF_EVENT = b"\n\n"
ERROR_TEXT_MAX = 400  # characters kept of an answer that is an error


class StreamBroken(Exception):
    """A stream reported that its request failed, or broke off."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class LoadClient:
    """One run against one server. One event loop uses it, inside `async with`."""

    def __init__(self, settings: Settings, dialect: Dialect) -> None:
        self._settings = settings
        self._dialect = dialect
        self._encoder = msgspec.json.Encoder()
        limit = settings.max_concurrency
        self._slots = asyncio.Semaphore(limit) if limit is not None else None
        self._started_at = 0.0

    async def run(self, asks: Sequence[Ask], on_end: Callable[[Outcome], None]) -> Run:
        """Send everything; returns when the last request has ended. on_end: called after each."""

        async def send(http: aiohttp.ClientSession) -> list[Outcome]:
            tasks: list[asyncio.Task[Outcome]] = []
            for ask in asks:
                await self._wait_until(ask.arrival_s)
                tasks.append(asyncio.create_task(self._one(http, ask, on_end)))
            return await asyncio.gather(*tasks)

        return await self._measure(send)

    async def replay(
        self,
        sessions: Sequence[Session],
        source: PromptSource,
        on_end: Callable[[Outcome], None],
    ) -> Run:
        """Play all sessions to their ends; one of which a turn failed ends with it."""
        limit = self._settings.max_sessions
        places = asyncio.Semaphore(limit if limit is not None else max(1, len(sessions)))
        starts = accumulate((len(session.turns) for session in sessions), initial=0)

        async def send(http: aiohttp.ClientSession) -> list[Outcome]:
            played = await asyncio.gather(
                *(
                    self._play(
                        http,
                        session,
                        self._dialect.converse(session, source, start),
                        places,
                        on_end,
                    )
                    for session, start in zip(sessions, starts, strict=False)
                )
            )
            return [outcome for outcomes in played for outcome in outcomes]

        run = await self._measure(send)
        return replace(run, unsent_count=turn_count(sessions) - len(run.outcomes))

    async def _measure(
        self, send: Callable[[aiohttp.ClientSession], Awaitable[list[Outcome]]]
    ) -> Run:
        timeout = aiohttp.ClientTimeout(
            total=self._settings.request_timeout_s, sock_connect=CONNECT_TIMEOUT_S
        )
        async with aiohttp.ClientSession(
            headers=headers_of(self._settings),
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
        ) as http:
            lags_s: list[float] = []
            self._started_at = time.perf_counter()
            watching = asyncio.create_task(_watch_lag(lags_s))
            outcomes = await send(http)
            watching.cancel()
        duration_s = max(outcome.ended_s for outcome in outcomes)
        return Run(outcomes, duration_s, lags_s)

    async def _play(
        self,
        http: aiohttp.ClientSession,
        session: Session,
        conversation: Conversation,
        places: asyncio.Semaphore,
        on_end: Callable[[Outcome], None],
    ) -> list[Outcome]:
        """The turns of one session. Their outcomes don't keep the prompts, which are long."""
        outcomes: list[Outcome] = []
        await self._wait_until(session.begin_s)
        is_limited = places.locked()
        async with places:
            # Waiting for a place is no lateness: with a limit, sessions begin when they can.
            due_s = max(session.begin_s, self._now()) if is_limited else session.begin_s
            for number, turn in enumerate(session.turns):
                if number:
                    due_s = outcomes[-1].ended_s + turn.think_s
                    await self._wait_until(due_s)
                outcome = await self._one(
                    http, conversation.ask(number, due_s), on_end, conversation
                )
                outcomes.append(outcome)
                if not outcome.is_good:
                    break
        return outcomes

    def _now(self) -> float:
        return time.perf_counter() - self._started_at

    async def _wait_until(self, due_s: float) -> None:
        delay_s = due_s - self._now()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _one(
        self,
        http: aiohttp.ClientSession,
        ask: Ask,
        on_end: Callable[[Outcome], None],
        conversation: Conversation | None = None,
    ) -> Outcome:
        outcome = Outcome(ask, due_s=ask.arrival_s, began_s=self._now())
        payload = self._encoder.encode(self._dialect.body(ask))
        if self._slots is not None:
            await self._slots.acquire()
        try:
            outcome.sent_s = self._now()
            await self._exchange(http, payload, outcome)
            if conversation is not None and (why := conversation.hear(outcome)):
                raise StreamBroken("no token ids", why)
        except StreamBroken as broken:
            outcome.error_kind, outcome.error = broken.kind, str(broken)
        except aiohttp.ConnectionTimeoutError:
            outcome.error_kind = "connect"
            outcome.error = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except TimeoutError:
            limit_s = self._settings.request_timeout_s
            outcome.error_kind, outcome.error = "timeout", f"no end within {limit_s:g} s"
        except aiohttp.ClientConnectorError as error:
            outcome.error_kind, outcome.error = "connect", str(error)
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.error_kind, outcome.error = "cut off", f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            outcome.error_kind, outcome.error = "unreadable", str(error)
        finally:
            outcome.ended_s = self._now()
            outcome.prompt_count = outcome.prompt_count or len(ask.prompt)
            if self._slots is not None:
                self._slots.release()
            if conversation is not None:  # all of them together are too much
                outcome.ask = replace(ask, prompt=(), messages=())
                outcome.output_ids, outcome.text = [], ""
        on_end(outcome)
        return outcome

    async def _exchange(
        self, http: aiohttp.ClientSession, payload: bytes, outcome: Outcome
    ) -> None:
        url = self._settings.url + self._dialect.path
        json_header = {"Content-Type": "application/json"}
        async with http.post(url, data=payload, headers=json_header) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:ERROR_TEXT_MAX]
                raise StreamBroken(f"http {response.status}", text)
            rest = b""
            is_done = False
            async for piece in response.content.iter_any():
                now_s = self._now()
                *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(END_OF_EVENT)
                for event in events:
                    content = event.removeprefix(b"data:").strip()
                    if content == DONE:
                        is_done = True
                    elif content and not content.startswith(b":"):
                        self._note(outcome, content, now_s)
        if not is_done:
            raise StreamBroken("cut off", "the stream ended without [DONE]")
        if not outcome.arrivals:
            raise StreamBroken("no tokens", "the stream ended well and brought no token")

    def _note(self, outcome: Outcome, content: bytes, now_s: float) -> None:
        heard = self._dialect.hear(content)
        if heard.failure:
            raise StreamBroken("failed", heard.failure)
        if heard.prompt_count is not None:
            outcome.prompt_count = heard.prompt_count
        if heard.cached_count is not None:
            outcome.cached_count = heard.cached_count
        reported = heard.output_count
        count = outcome.output_count + int(heard.has_text) if reported is None else reported
        # The sum at the end may count tokens without text, which had no event of their own.
        is_arrival = heard.has_text or (reported is not None and outcome.arrivals == [])
        if count > outcome.output_count and is_arrival:
            outcome.arrivals.append((now_s, count))
        outcome.output_count = max(outcome.output_count, count)
        if heard.has_all_ids:
            outcome.output_ids = heard.output_ids
        else:
            outcome.output_ids += heard.output_ids
        outcome.text += heard.text


def headers_of(settings: Settings) -> dict[str, str]:
    return {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}


async def _watch_lag(lags_s: list[float]) -> None:
    """How much later than asked for this loop gets its turn: what every time noted is off by."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_s.append(max(0.0, time.perf_counter() - before - LAG_INTERVAL_S))
