"""/v1/messages: what comes in is a chat, what goes out is what Anthropic's SDK has types for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from common.config import Role
from common.frontend.bodies.fields import JsonObject
from common.protocol.frontend import Failed
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    post_object,
    run_generate,
    say_text,
    serve_http,
    typed_events,
)
from tests.frontend.scripted_scheduler import count_up

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
STOP = FinishReason(FinishKind.STOP)
USER: JsonObject = {"role": "user", "content": "hello"}
ASK: JsonObject = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
TOOL: JsonObject = {"name": "get_weather", "input_schema": {"type": "object"}}
CALLED = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
# Of features that this server does not have.
ABSENT = {"container", "diagnostics", "stop_details"}


def test_a_reply_is_a_message_of_the_sdk(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(CALLED, STOP)
        reply = await post_object(rig, PATH, {**ASK, "tools": [TOOL]})
        message = Message.model_validate(reply)
        assert set(Message.model_fields) - set(reply) == ABSENT
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        text, call = message.content
        assert text.type == "text" and text.text == "Let me see."
        assert call.type == "tool_use" and call.name == "get_weather"
        assert call.input == {"city": "Oslo"}
        usage = message.usage
        assert usage.input_tokens == len(rig.scheduler.submits[-1].token_ids)
        assert usage.output_tokens == len(TOKENIZER.encode(CALLED))
        assert usage.cache_read_input_tokens == 0

    run_generate(tmp_path, story, tool_call_parser="hermes")


def test_a_stream_tells_the_message_in_the_order_of_anthropic_s_events(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(CALLED, STOP)
        events = await typed_events(rig, PATH, {**ASK, "tools": [TOOL]})
        for event in events:
            if event["type"] != "ping":
                EVENT.validate_python(event)
        names = [event["type"] for event in events]
        assert [name for i, name in enumerate(names) if name != names[i - 1]] == [
            "message_start", "ping",
            "content_block_start", "content_block_delta", "content_block_stop",
            "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        deltas = [at(e, "delta") for e in events if e["type"] == "content_block_delta"]
        texts = [str(at(d, "text")) for d in deltas if at(d, "type") == "text_delta"]
        assert "".join(texts) == "Let me see." and len(texts) > 2
        (spelled,) = [
            str(at(d, "partial_json")) for d in deltas if at(d, "type") == "input_json_delta"
        ]
        assert json.loads(spelled) == {"city": "Oslo"}
        assert at(events[-2], "delta", "stop_reason") == "tool_use"
        count = len(TOKENIZER.encode(CALLED))
        assert at(events[-2], "usage", "output_tokens") == count

    run_generate(tmp_path, story, tool_call_parser="hermes")


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_what_is_thought_is_a_block_of_its_own(tmp_path: Path, display: str) -> None:
    thought = "I must look." if display == "summarized" else ""

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(f"<think>\nI must look.\n</think>\n\n{CALLED}", STOP)
        thinking: JsonObject = {"type": "enabled", "budget_tokens": 1024, "display": display}
        asked: JsonObject = {**ASK, "tools": [TOOL], "thinking": thinking}
        message = Message.model_validate(await post_object(rig, PATH, asked))
        first, text, call = message.content
        assert first.type == "thinking" and (first.thinking, first.signature) == (thought, "")
        assert text.type == "text" and text.text == "Let me see." and call.type == "tool_use"
        events = await typed_events(rig, PATH, asked)
        deltas = [at(e, "delta") for e in events if e["type"] == "content_block_delta"]
        told = [str(at(d, "thinking")) for d in deltas if at(d, "type") == "thinking_delta"]
        assert "".join(told) == thought
        assert at(events[2], "content_block", "type") == "thinking"

    run_generate(tmp_path, story, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("asked", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nothing", "day"]}, "stop_sequence", "day"),
    ],
)
def test_why_it_stopped(
    tmp_path: Path, asked: JsonObject, reason: str, sequence: str | None, is_streaming: bool
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("Good day to you.", STOP)
        if is_streaming:
            told = at((await typed_events(rig, PATH, {**ASK, **asked}))[-2], "delta")
        else:
            told = await post_object(rig, PATH, {**ASK, **asked})
        assert (at(told, "stop_reason"), at(told, "stop_sequence")) == (reason, sequence)

    run_generate(tmp_path, story)


@pytest.mark.slow
def test_the_sdk_reads_messages_streams_and_counts(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(CALLED, STOP)
        tools: list[anthropic.types.ToolParam] = [
            {"name": "get_weather", "input_schema": {"type": "object"}}
        ]
        asked: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]
        async with serve_http(rig) as served:
            client = AsyncAnthropic(base_url=served.url, api_key="key-1", max_retries=0)
            whole = await client.messages.create(
                model="tiny", max_tokens=200, messages=asked, tools=tools
            )
            async with client.messages.stream(
                model="tiny", max_tokens=200, messages=asked, tools=tools
            ) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "Let me see."
            assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
            for one in (final, whole):
                called = one.content[1]
                assert called.type == "tool_use" and called.input == {"city": "Oslo"}
            counted = await client.messages.count_tokens(
                model="tiny", messages=asked, tools=tools, system="Be kind."
            )
            beta = await client.beta.messages.create(
                model="tiny", max_tokens=200, messages=[{"role": "user", "content": "hello"}],
                tools=[{"name": "get_weather", "input_schema": {"type": "object"}}],
            )  # fmt: skip
            assert beta.stop_reason == whole.stop_reason
            bare = await client.messages.count_tokens(model="tiny", messages=asked, tools=tools)
            assert counted.input_tokens > bare.input_tokens == whole.usage.input_tokens
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="claude", max_tokens=1, messages=asked)
            with pytest.raises(anthropic.BadRequestError, match="temperature=-1"):
                await client.messages.create(
                    model="tiny", max_tokens=1, messages=asked, extra_body={"temperature": -1}
                )
            await client.close()

    run_generate(tmp_path, story, tool_call_parser="hermes", api_keys=("key-1",))


@pytest.mark.slow
def test_a_failure_inside_a_stream_is_anthropic_s_error_event(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            request = served.http.stream("POST", PATH, json={**ASK, "stream": True})
            asked = asyncio.create_task(request.__aenter__())
            await rig.until(lambda s: len(s.held) == 1)
            (number,) = rig.scheduler.held
            rig.scheduler.send(count_up(rig.scheduler.held[number])[0])
            lines = (await asked).aiter_lines()
            assert await anext(lines) == "event: message_start"
            rig.scheduler.send(Failed(number, 500, "peer_lost", "gone"))
            *_, name, data = [line async for line in lines if line]
            assert name == "event: error"
            assert json.loads(data.removeprefix("data: ")) == {
                "type": "error", "error": {"type": "api_error", "message": "gone"}
            }  # fmt: skip
            await request.__aexit__(None, None, None)

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (503, "overloaded_error"), (504, "timeout_error"),
     (500, "api_error")],
)  # fmt: skip
def test_errors_have_anthropic_s_shape(tmp_path: Path, status: int, kind: str) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda s: [Failed(s.request_id, status, "why", "full")]
        for is_streaming in (False, True):
            reply = await rig.http.post(PATH, json={**ASK, "stream": is_streaming})
            assert reply.status_code == status
            error = {"type": kind, "message": "full"}
            assert reply.json() == {"type": "error", "error": error}

    run_generate(tmp_path, story)


def test_a_missing_key_and_a_missing_route_are_told_alike(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for headers, status, kind in (
            ({}, 401, "authentication_error"),
            ({"x-api-key": "key-2"}, 401, "authentication_error"),
            ({"x-api-key": "key-1", "anthropic-version": "2023-06-01"}, 400, None),
            ({"authorization": "Bearer key-1"}, 400, "invalid_request_error"),
        ):
            reply = await rig.http.post(PATH, json={}, headers=headers)
            assert reply.status_code == status
            assert reply.json()["type"] == "error"
            assert kind in (None, reply.json()["error"]["type"])
        missing = await rig.http.post(f"{PATH}/batches", json={}, headers={"x-api-key": "key-1"})
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"

    run_generate(tmp_path, story, api_keys=("key-1",))


def test_a_prefill_server_answers_what_it_holds(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        asked: JsonObject = {**ASK, "kv_transfer_params": {"do_remote_decode": True}}
        whole = await post_object(rig, PATH, asked)
        last = (await typed_events(rig, PATH, asked))[-2]
        for reply in (whole, last):
            assert at(reply, "kv_transfer_params", "do_remote_prefill") is True

    run_generate(tmp_path, story, role=Role.PREFILL)
