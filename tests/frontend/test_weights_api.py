"""Pauses and other weights as a client of the HTTP API sees them, over a scripted scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from common.frontend.bodies.fields import JsonObject
from common.frontend.requests.scheduler_health import SchedulerHealth
from common.frontend.requests.weight_spans import WeightSpans
from common.protocol.frontend import Cancel, Pause, State, Submit, Tokens, UpdateWeights
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import counted_up, run_generate
from tests.frontend.test_scheduler_comes_back import end, successor

PROMPT = [5, 6]
COUNT = 9
BODY: JsonObject = {
    "input_ids": [5, 6],
    "sampling_params": {"max_new_tokens": COUNT, "ignore_eos": True},
}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


async def post(rig: Rig, path: str, body: JsonObject | None = None) -> httpx.Response:
    return await rig.http.post(path, json=body) if body is not None else await rig.http.post(path)


@asynccontextmanager
async def under_way(rig: Rig, count: int) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """An answer of which so many tokens have come."""
    rig.scheduler.holds = True
    task = asyncio.create_task(post(rig, "/generate", BODY))
    await rig.until(lambda s: bool(s.held))
    (handle,) = rig.context.scheduler.open_requests
    if count:
        rig.scheduler.send(Tokens(handle.request_id, counted_up(PROMPT, count)))
    while len(handle.output_ids) < count:
        await asyncio.sleep(0)
    yield task
    await task


@pytest.mark.parametrize("body", [None, {}, {"mode": "abort"}])
def test_a_pause_ends_what_is_open_with_what_it_has(tmp_path: Path, body: JsonObject) -> None:
    """Which is what SGLang does unless another mode is asked for."""

    async def story(rig: Rig) -> None:
        async with under_way(rig, 2) as answer:
            reply = await post(rig, "/pause_generation", body)
            assert (reply.status_code, reply.json()) == (200, PAUSED)
        item = (await answer).json()
        assert item["output_ids"] == counted_up(PROMPT, 2)
        assert item["meta_info"]["finish_reason"]["type"] == "abort"
        told = [type(m) for m in rig.scheduler.seen if isinstance(m, Pause | Cancel)]
        assert told == [Pause, Cancel], "nothing else begins in its place"

    run_generate(tmp_path, story)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_other_pauses_end_nothing(tmp_path: Path, mode: str) -> None:
    async def story(rig: Rig) -> None:
        async with under_way(rig, 0) as answer:
            assert (await post(rig, "/pause_generation", {"mode": mode})).json() == PAUSED
            assert (await rig.http.get("/server_info")).json()["is_paused"] is True
            assert (await rig.http.get("/health")).json()["is_paused"] is True
            probe = await rig.http.get("/health_generate")
            assert probe.status_code == 503 and "paused" in probe.text
            assert (await post(rig, "/continue_generation")).json() == CONTINUED
            assert (await rig.http.get("/server_info")).json()["is_paused"] is False
            assert "is_paused" not in (await rig.http.get("/health")).json()
            rig.scheduler.release()
        assert (await answer).json()["output_ids"] == counted_up(PROMPT, COUNT)
        (told,) = [m for m in rig.scheduler.seen if isinstance(m, Pause)]
        assert told.retracts is (mode == "retract")

    run_generate(tmp_path, story)


def test_an_update_names_the_new_weights_and_what_goes_on_with_them(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with under_way(rig, 2) as answer:
            rig.scheduler.holds = False
            body: JsonObject = {"model_path": str(tmp_path), "weight_version": "step-5"}
            reply = await post(rig, "/update_weights_from_disk", body)
            assert (reply.status_code, reply.json()) == (
                200,
                {
                    "success": True,
                    "message": "Succeeded to update model weights.",
                    "num_paused_requests": 1,
                },
            )
        item = (await answer).json()
        assert item["output_ids"] == counted_up(PROMPT, COUNT)
        meta = item["meta_info"]
        assert meta["weight_version"] == "step-5"
        assert meta["weight_versions"] == [["default", 2], ["step-5", COUNT - 2]]
        info = (await rig.http.get("/model_info")).json()
        assert (info["weight_version"], info["model_path"]) == ("step-5", str(tmp_path))
        assert (await rig.http.get("/server_info")).json()["weight_version"] == "step-5"
        for path in ("/weight_version", "/get_weight_version"):
            assert (await rig.http.get(path)).json() == {"weight_version": "step-5"}
        later = (await post(rig, "/generate", BODY)).json()["meta_info"]
        assert later["weight_version"] == "step-5" and "weight_versions" not in later

    run_generate(tmp_path, story)


def test_an_update_that_fails_says_why_and_changes_nothing(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.update_problem = "no such tensor"
        body: JsonObject = {"model_path": str(tmp_path), "weight_version": "step-5"}
        reply = await post(rig, "/update_weights_from_disk", body)
        assert (reply.status_code, reply.json()) == (
            400,
            {
                "success": False,
                "message": "no such tensor",
                "num_paused_requests": 0,
                "error": {"message": "no such tensor"},
            },
        )
        assert (await rig.http.get("/model_info")).json()["weight_version"] == "default"

    run_generate(tmp_path, story)


def test_an_update_may_end_what_is_open_and_keep_the_rest_waiting(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with under_way(rig, 2) as answer:
            body: JsonObject = {
                "model_path": str(tmp_path), "abort_all_requests": True, "keep_pause": True
            }  # fmt: skip
            reply = await post(rig, "/update_weights_from_disk", body)
            assert reply.json()["success"] is True
        meta = (await answer).json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["weight_version"] == "default"
        # The scheduler that follows is paused as well.
        await rig.until(lambda s: any(m == Pause(0) for m in s.seen))

    run_generate(tmp_path, story)


def test_the_weights_can_be_called_differently(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post(rig, "/update_weight_version", {"new_version": "v2"})
        assert reply.status_code == 200
        assert reply.json()["success"] is True and reply.json()["new_version"] == "v2"
        (asked,) = [m.weights for m in rig.scheduler.seen if isinstance(m, UpdateWeights)]
        assert (asked.model_path, asked.version) == ("", "v2")

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/", "flush_cache": False}, "flush_cache"),
        ("/update_weights_from_disk", {"model_path": "/", "load_format": "pt"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": "/", "is_async": True}, "is_async"),
        ("/update_weights_from_disk", {"model_path": "/", "token_step": 3}, "token_step"),
        ("/update_weights_from_disk", {"model_path": "/", "weight_version": ""}, "weight_version"),
        ("/update_weight_version", {}, "new_version"),
    ],
)
def test_what_can_t_be_done_is_refused_by_name(
    tmp_path: Path, path: str, body: JsonObject, named: str
) -> None:
    async def story(rig: Rig) -> None:
        reply = await post(rig, path, body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"]
        assert not any(isinstance(m, Pause | UpdateWeights) for m in rig.scheduler.seen)

    run_generate(tmp_path, story)


def test_a_scheduler_that_comes_back_in_a_pause_hears_of_it_first(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with under_way(rig, 2) as answer:
            await post(rig, "/pause_generation", {"mode": "in_place"})
            await end(rig)
            async with successor(rig) as second:
                assert (await answer).json()["output_ids"] == counted_up(PROMPT, COUNT)
                told = [m for m in second.seen if isinstance(m, Pause | Submit)]
                assert [type(m) for m in told] == [Pause, Submit]

    run_generate(tmp_path, story)


def test_a_scheduler_that_ends_in_an_update_has_not_made_it(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.is_silent = True
        body: JsonObject = {"model_path": str(tmp_path), "weight_version": "step-5"}
        update = asyncio.create_task(post(rig, "/update_weights_from_disk", body))
        await rig.until(lambda s: any(isinstance(m, UpdateWeights) for m in s.seen))
        await end(rig)
        async with successor(rig):
            reply = await update
        assert reply.status_code == 400 and "ended" in reply.json()["message"]

    run_generate(tmp_path, story)


def test_spans_are_joined_by_version_and_cut_where_the_answer_ends() -> None:
    spans = WeightSpans()
    for version, count in (("a", 2), ("a", 3), ("b", 0), ("b", 4), ("a", 1)):
        spans.add(version, count)
    assert spans.of_first(10) == [("a", 5), ("b", 4), ("a", 1)]
    assert spans.of_first(7) == [("a", 5), ("b", 2)]
    assert spans.of_first(5) == [("a", 5)]
    assert spans.of_first(0) == []


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_pause_is_no_standstill(*, is_paused: bool) -> None:
    health = SchedulerHealth(0.0)
    for second in range(60):
        health.hear(float(second))
        health.hear_state(
            State(1, True, {"running": 1}, {}, [], [], step_count=3, is_paused=is_paused),
            float(second),
        )
        trouble = health.trouble(float(second), is_started=True)
    assert (trouble == "") is is_paused
