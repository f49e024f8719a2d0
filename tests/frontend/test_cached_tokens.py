"""What was cached of a prompt, and where, as clients are told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.frontend.bodies.fields import JsonObject, JsonValue
from common.protocol.frontend import Submit, Tokens, ToldFrontend
from common.request import CachedTokens
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import at, post, post_object, post_stream, run_generate
from tests.frontend.scripted_scheduler import count_up

IDS: list[JsonValue] = [*range(5, 45)]
CACHED = CachedTokens(prefill=16, decode=32)
DETAILS = "cached_tokens_details"
USAGE = ("usage", "prompt_tokens_details", "cached_tokens")


def answer_cached(submit: Submit) -> list[ToldFrontend]:
    """A whole answer; of prompts that begin as IDS do, something was cached on both servers."""
    cached = CACHED if submit.token_ids[0] == 5 else CachedTokens()
    return [
        msgspec.structs.replace(one, cached=cached) if isinstance(one, Tokens) else one
        for one in count_up(submit)
    ]


def test_generate_tells_what_was_cached_and_on_which_server(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = answer_cached
        params: JsonObject = {"max_new_tokens": 3}
        prompts: JsonValue = [IDS, [50, 51]]
        reply = await post(rig, "/generate", {"input_ids": prompts, "sampling_params": params})
        told = [
            (at(reply, i, "meta_info", "cached_tokens"), at(reply, i, "meta_info", DETAILS))
            for i in range(2)
        ]
        assert told == [
            (32, {"prefill": 16, "decode": 32}),
            (0, {"prefill": 0, "decode": 0}),
        ]
        events = await post_stream(rig, "/generate", {"input_ids": IDS, "sampling_params": params})
        assert {at(event, "meta_info", "cached_tokens") for event in events} == {32}

    run_generate(tmp_path, story)


@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_what_was_cached_of_a_prompt_once(n: int, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = answer_cached
        body: JsonObject = {"prompt": [IDS, [50, 51], IDS], "n": n, "max_tokens": 2}
        reply = await post_object(rig, "/v1/completions", body)
        assert at(reply, *USAGE) == 64
        assert at(reply, "usage", "prompt_tokens") == 82
        options: JsonObject = {"include_usage": True}
        events = await post_stream(rig, "/v1/completions", {**body, "stream_options": options})
        assert at(events[-1], *USAGE) == 64

    run_generate(tmp_path, story)


def test_running_usage_of_a_chat_tells_what_was_cached_from_the_first_chunk_on(
    tmp_path: Path,
) -> None:
    def answer(submit: Submit) -> list[ToldFrontend]:
        return [
            msgspec.structs.replace(one, cached=CACHED) if isinstance(one, Tokens) else one
            for one in count_up(submit)
        ]

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = answer
        options: JsonObject = {"include_usage": True, "continuous_usage_stats": True}
        body: JsonObject = {
            "messages": [{"role": "user", "content": "the crooked chain"}],
            "max_tokens": 2,
            "stream_options": options,
        }
        events = await post_stream(rig, "/v1/chat/completions", body)
        assert {at(event, *USAGE) for event in events} == {32}

    run_generate(tmp_path, story)


def test_what_was_cached_is_part_of_a_request_s_account(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        def answer(submit: Submit) -> list[ToldFrontend]:
            messages = answer_cached(submit)
            last = messages[-1]
            assert isinstance(last, Tokens) and last.trace is not None
            trace = msgspec.structs.replace(last.trace, cached=CACHED, origin=submit.origin)
            return [*messages[:-1], msgspec.structs.replace(last, trace=trace)]

        rig.scheduler.answer = answer
        reply = await post(rig, "/generate", {"input_ids": IDS, "rid": "r"})
        details = {"prefill": 16, "decode": 32}
        assert at(reply, "meta_info", "timeline", "cached") == details
        timeline = (await rig.http.get("/requests/r/timeline")).json()
        assert (timeline["cached_tokens"], timeline[DETAILS]) == (32, details)
        (listed,) = (await rig.http.get("/requests")).json()["requests"]
        assert (listed["cached_tokens"], listed[DETAILS]) == (32, details)
        whole = next(
            event
            for event in (await rig.http.get("/trace")).json()["traceEvents"]
            if event["name"] == "request"
        )
        assert whole["args"][DETAILS] == details
        (shown,) = (await rig.http.get("/state")).json()["requests"]
        assert shown[DETAILS] == details

    run_generate(tmp_path, story)
