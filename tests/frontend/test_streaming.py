"""Work that ends with its client: every order in which the two, and the server, may end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from starlette.types import Message

from common.errors import RequestError
from common.frontend.http.streaming import run_until_disconnect


class Connection:
    """A client that stays until `leave`."""

    def __init__(self) -> None:
        self._has_left = asyncio.Event()

    def leave(self) -> None:
        self._has_left.set()

    async def receive(self) -> Message:
        await self._has_left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Goes on until `end`, and tells what became of it."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        self.has_cleaned_up = False

    async def run(self) -> str:
        try:
            self.begun.set()
            await self.end.wait()
            return "done"
        finally:
            with suppress(asyncio.CancelledError):  # a second one, while it cleans up
                await asyncio.sleep(0)
            self.has_cleaned_up = True


Story = Callable[[Connection, Work, "asyncio.Task[str | None]"], Awaitable[None]]


def play(story: Story) -> None:
    async def run() -> None:
        connection, work = Connection(), Work()
        running = asyncio.create_task(run_until_disconnect(work.run(), connection.receive))
        await work.begun.wait()
        await story(connection, work, running)
        assert work.has_cleaned_up
        assert len(asyncio.all_tasks()) == 1, "none of its tasks is left"

    asyncio.run(run())


def test_the_result_comes_while_the_client_stays() -> None:
    async def story(connection: Connection, work: Work, running: asyncio.Task[str | None]) -> None:
        work.end.set()
        assert await running == "done" and not running.cancelling()

    play(story)


def test_work_is_cancelled_and_cleaned_up_when_its_client_leaves() -> None:
    async def story(connection: Connection, work: Work, running: asyncio.Task[str | None]) -> None:
        connection.leave()
        assert await running is None and not running.cancelling()

    play(story)


def test_a_client_that_leaves_with_the_answer_changes_nothing() -> None:
    async def story(connection: Connection, work: Work, running: asyncio.Task[str | None]) -> None:
        work.end.set()
        for _ in range(3):  # the work has just ended, and no waiting task has run yet
            await asyncio.sleep(0)
        connection.leave()
        assert await running in ("done", None) and not running.cancelling()

    play(story)


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("turn_count", range(5))
def test_whoever_cancels_the_request_is_obeyed(has_ended: bool, turn_count: int) -> None:
    async def story(connection: Connection, work: Work, running: asyncio.Task[str | None]) -> None:
        if has_ended:
            work.end.set()
        for _ in range(turn_count):
            await asyncio.sleep(0)
        if running.cancel():
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            assert running.result() == "done"

    play(story)


def test_an_error_of_the_work_is_the_request_s() -> None:
    async def fail() -> None:
        raise RequestError("no such thing")

    async def run() -> None:
        with pytest.raises(RequestError, match="no such thing"):
            await run_until_disconnect(fail(), Connection().receive)

    asyncio.run(run())
