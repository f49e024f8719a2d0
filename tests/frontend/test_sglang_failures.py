"""/generate when it fails: bad input, a sample that ends badly, a client that goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.frontend.bodies.fields import JsonObject
from common.protocol.frontend import Failed, Submit, ToldFrontend
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    at,
    counted_up,
    events_of,
    post_object,
    run_generate,
    serve_http,
)
from tests.frontend.scripted_scheduler import count_up
from tests.frontend.test_sglang_api import GREEDY

# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streaming", [False, True])
def test_bad_input_is_a_400_also_if_a_stream_was_asked_for(
    is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"text": "a", "sampling_params": {"top_p": 2}, "stream": is_streaming}
        reply = await post_object(rig, "/generate", body, 400)
        assert reply == {
            "error": {"message": "sampling_params.top_p=2: must be a finite number in (0, 1]"}
        }
        reply = await post_object(rig, "/generate", {}, 400)
        assert "text, input_ids" in str(at(reply, "error", "message"))
        broken = await rig.http.post("/generate", content=b'{"text": ')
        assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]

    run_generate(tmp_path, story)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("status", "kind"), [(503, "queue_full"), (500, "transfer_failed")])
def test_a_failure_before_the_first_token_has_its_own_status(
    is_streaming: bool, status: int, kind: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda submit: [Failed(submit.request_id, status, kind, "why")]
        body: JsonObject = {"text": "a", "stream": is_streaming}
        reply = await rig.http.post("/generate", json=body)
        assert reply.status_code == status
        assert reply.json() == {"error": {"message": "why"}}
        assert ("retry-after" in reply.headers) == (status == 503)

    run_generate(tmp_path, story)


def failing_midway(submit: Submit) -> list[ToldFrontend]:
    """The first prompt token 5 fails after a token, all others succeed."""
    if submit.token_ids[0] != 5:
        return count_up(submit)
    return [count_up(submit)[0], Failed(submit.request_id, 500, "peer_lost", "gone")]


def test_a_failure_inside_a_stream_ends_its_own_sample(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        body = {"input_ids": [[6], [5]], "sampling_params": {"max_new_tokens": 3}, "stream": True}
        async with serve_http(rig) as served:
            request = served.http.stream("POST", "/generate", json=body)
            asked = asyncio.create_task(request.__aenter__())
            await rig.until(lambda s: len(s.held) == 2)
            first, second = sorted(rig.scheduler.held)
            rig.scheduler.send(count_up(rig.scheduler.held[second])[0])
            reply = await asked
            parts = reply.aiter_text()
            begun = await anext(parts)
            rig.scheduler.send(Failed(second, 500, "peer_lost", "gone"))
            rig.scheduler.release(first)
            events = events_of(begun + "".join([part async for part in parts]))
            await request.__aexit__(None, None, None)
        last = {event["index"]: event for event in events}
        assert at(last[1], "meta_info", "finish_reason") == {
            "type": "abort",
            "message": "gone",
            "status_code": 500,
            "err_type": "peer_lost",
        }
        assert last[1]["output_ids"] == counted_up([5], 1)
        assert last[0]["output_ids"] == counted_up([6], 3)

    run_generate(tmp_path, story)


def test_a_failure_in_a_plain_batch_cancels_the_others(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        asked = asyncio.create_task(
            post_object(rig, "/generate", {"input_ids": [[5], [6]]}, status=500)
        )
        await rig.until(lambda s: len(s.held) == 2)
        first, second = sorted(rig.scheduler.held)
        rig.scheduler.answer = failing_midway
        rig.scheduler.release(first)
        assert await asked == {"error": {"message": "gone"}}
        await rig.until(lambda s: [c.request_id for c in s.cancels] == [second])

    run_generate(tmp_path, story)


def test_an_aborted_request_answers_with_what_there_is(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        body: JsonObject = {"text": "a", "rid": "mine"}
        asked = asyncio.create_task(post_object(rig, "/generate", body))
        await rig.until(lambda s: len(s.held) == 1)
        await rig.http.post("/abort_request", json={"rid": "mine"})
        reply = await asked
        assert reply["output_ids"] == []
        assert at(reply, "meta_info", "finish_reason", "type") == "abort"
        assert "abort" in str(at(reply, "meta_info", "finish_reason", "message"))

    run_generate(tmp_path, story)


def test_an_rid_in_use_is_refused_and_none_of_its_batch_goes_on(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        asked = asyncio.create_task(post_object(rig, "/generate", {"text": "a", "rid": "x"}))
        await rig.until(lambda s: len(s.held) == 1)
        batch: JsonObject = {"text": ["b", "c"], "rid": ["y", "x"]}
        reply = await post_object(rig, "/generate", batch, status=400)
        assert "rid" in str(at(reply, "error", "message"))
        await rig.until(lambda s: len(s.submits) == 2 and len(s.cancels) == 1)
        assert rig.scheduler.cancels[0].request_id == rig.scheduler.submits[1].request_id
        rig.scheduler.release()
        assert at(await asked, "meta_info", "id") == "x"

    run_generate(tmp_path, story)


def test_x_request_id_is_part_of_the_name_and_may_come_twice(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        names = []
        for _ in range(2):
            reply = await rig.http.post(
                "/generate", json={"text": "a"}, headers={"X-Request-Id": "bench-7"}
            )
            names.append(reply.json()["meta_info"]["id"])
        assert all(name.startswith("bench-7-") for name in names) and len(set(names)) == 2
        odd = await rig.http.post(
            "/generate", json={"text": "a"}, headers={"X-Request-Id": "a b" * 100}
        )
        assert "a b" not in odd.json()["meta_info"]["id"]

    run_generate(tmp_path, story)


# ---- disconnects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_goes_away_before_the_first_token_is_cancelled(
    is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            body = {"text": ["a", "b"], "stream": is_streaming}
            asked = asyncio.create_task(served.http.post("/generate", json=body))
            await rig.until(lambda s: len(s.held) == 2)
            asked.cancel()
            await rig.until(lambda s: len(s.cancels) == 2)
        assert rig.scheduler.held == {}

    run_generate(tmp_path, story)


def test_a_client_that_leaves_a_stream_is_cancelled(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            body = {"text": "a", "stream": True}
            request = served.http.stream("POST", "/generate", json=body)
            asked = asyncio.create_task(request.__aenter__())
            await rig.until(lambda s: len(s.held) == 1)
            (submit,) = rig.scheduler.held.values()
            rig.scheduler.send(count_up(submit)[0])
            reply = await asked
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            await request.__aexit__(None, None, None)
            await rig.until(lambda s: len(s.cancels) == 1)

    run_generate(tmp_path, story)


def test_a_reply_after_done_is_no_abort(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with serve_http(rig) as served:
            reply = await served.http.post("/generate", json={"text": "a", "stream": True})
            assert events_of(reply.text)
        assert rig.scheduler.cancels == []

    run_generate(tmp_path, story)


def test_a_large_body_is_checked_off_the_loop_with_the_same_answer(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, "/generate", {"text": "a " * 5000}, status=400)
        assert "the prompt has" in str(at(reply, "error", "message"))
        padded: JsonObject = {"input_ids": [5], "sampling_params": GREEDY, "unused": "x" * 9000}
        assert (await post_object(rig, "/generate", padded))["output_ids"] == counted_up([5], 4)

    run_generate(tmp_path, story)
