"""What a server's log says of requests that it could not serve."""

from __future__ import annotations

import asyncio

import pytest

from common.frontend.requests import failure_log
from common.frontend.requests.failure_log import FailureLog


def test_a_flood_of_failures_is_one_line_at_once_and_one_with_all_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_log, "INTERVAL_S", 0.01)

    async def story() -> None:
        log = FailureLog()
        for index in range(380):
            log.note("no_prefill_server", f"a-{index}", "nobody is connected")
        log.note("timed_out", "b-1", "")
        assert len(caplog.messages) == 1
        while len(caplog.messages) < 2:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert caplog.messages == [
        "1 request failed (1 no_prefill_server); the latest, a-0: nobody is connected",
        "380 requests failed (379 no_prefill_server, 1 timed_out); the latest, b-1",
    ]


def test_a_client_s_own_mistakes_and_aborts_are_not_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        log = FailureLog()
        for kind in ("bad_request", "prompt_mismatch", "aborted"):
            log.note(kind, "a", "")
        await asyncio.sleep(0)

    asyncio.run(story())
    assert caplog.messages == []


def test_a_kind_of_a_newer_peer_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        FailureLog().note("moon_in_the_way", "a", "behind clouds")

    asyncio.run(story())
    assert "1 request failed (1 moon_in_the_way); the latest, a: behind clouds" in caplog.messages
