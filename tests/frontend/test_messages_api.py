"""/v1/messages: what comes in is a chat, what goes out is what Anthropic's SDK has types for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from common.config import Role
from common.frontend.apis.messages_input import read_messages
from common.frontend.bodies.fields import JsonObject, JsonValue
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


def prompt_of(rig: Rig) -> str:
    return TOKENIZER.decode(rig.scheduler.submits[-1].token_ids, skip_special_tokens=False)


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


# ---- input ---------------------------------------------------------------------------------------

CONVERSATION: list[JsonValue] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I must look.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "fair"},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [
            {"type": "text", "text": "no"}, {"type": "text", "text": "such"},
        ]},
        {"type": "text", "text": "And now?"},
    ]},
]  # fmt: skip


def test_results_of_tools_become_messages_and_a_turn_stays_one() -> None:
    system: JsonValue = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c"},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    messages, is_open = read_messages(system, CONVERSATION)
    assert messages == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning_content": "I must look.",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"city": "Oslo"}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "fair"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "such"}],
            "is_error": True,
        },
        {"role": "user", "content": "And now?"},
    ]
    assert not is_open


def test_the_beginning_of_an_answer_is_continued(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        asked: JsonObject = {**ASK, "messages": [USER, {"role": "assistant", "content": "Good"}]}
        await post_object(rig, PATH, {**asked, "max_tokens": 1})
        assert prompt_of(rig).endswith("<|im_start|>assistant\nGood")

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("thinking", "has_block"),
    [({"type": "disabled"}, True), ({"type": "enabled", "budget_tokens": 1024}, False),
     ({"type": "adaptive"}, False)],
)  # fmt: skip
def test_the_template_is_told_whether_to_think(
    tmp_path: Path, thinking: JsonObject, has_block: bool
) -> None:
    async def story(rig: Rig) -> None:
        await post_object(rig, PATH, {**ASK, "thinking": thinking, "max_tokens": 1})
        assert prompt_of(rig).endswith("<think></think>") == has_block

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["get_weather", "stop"]), ({"type": "tool", "name": "stop"}, ["stop"])],
)
def test_calls_are_forced_as_in_a_chat(
    tmp_path: Path, choice: JsonObject, names: list[str]
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text('[{"name": "stop", "parameters": {}}]', STOP)
        tools: list[JsonValue] = [TOOL, {**TOOL, "name": "stop", "type": "custom"}]
        asked: JsonObject = {**ASK, "tools": tools, "tool_choice": choice}
        message = Message.model_validate(await post_object(rig, PATH, asked))
        (block,) = message.content
        assert block.type == "tool_use" and (block.name, block.input) == ("stop", {})
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None
        forced = json.loads(grammar.text)
        allowed = [one["properties"]["name"]["const"] for one in forced["items"]["anyOf"]]
        assert allowed == names
        one_call = {**choice, "disable_parallel_tool_use": True}
        await post_object(rig, PATH, {**asked, "tool_choice": one_call})
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None and json.loads(grammar.text)["maxItems"] == 1

    run_generate(tmp_path, story)


def test_a_count_is_that_of_the_prompt(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        prompt: JsonObject = {
            "messages": [USER, {"role": "assistant", "content": "Good"}], "system": "Be kind.",
            "tools": [TOOL], "thinking": {"type": "disabled"}, "model": "tiny",
        }  # fmt: skip
        counted = MessageTokensCount.model_validate(await post_object(rig, COUNT_PATH, prompt))
        await post_object(rig, PATH, {**prompt, "max_tokens": 1})
        assert counted.input_tokens == len(rig.scheduler.submits[-1].token_ids)

    run_generate(tmp_path, story)


BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, f"{BLOCK}.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, f"{BLOCK}.type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
         f"{BLOCK}.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         f"{BLOCK}.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
         f"{BLOCK}.name"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"speed": "fast"}, "speed"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["a"]}, "stop"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nil"}}}},
         "output_config.format.schema"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"top_k": 0}, "top_k"),
    ],
)  # fmt: skip
def test_what_can_t_be_honoured_is_refused_by_the_client_s_own_name(
    tmp_path: Path, body: JsonObject, field: str
) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {**ASK, **body}, 400)
        assert at(reply, "error", "type") == "invalid_request_error"
        assert str(at(reply, "error", "message")).startswith(field)

    run_generate(tmp_path, story)
