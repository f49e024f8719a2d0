"""/v1/responses: what comes in is a chat, what goes out is what OpenAI's SDK has types for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from common.config import Role
from common.frontend.bodies.fields import JsonObject
from common.protocol.frontend import Failed
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    post_object,
    prompt_of,
    run_generate,
    say_text,
    serve_http,
    typed_events,
)
from tests.frontend.scripted_scheduler import count_up

PATH = "/v1/responses"
STOP = FinishReason(FinishKind.STOP)
HELLO: JsonObject = {"input": "hello"}
TOOL: JsonObject = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
CALLED = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
# Of features that this server does not have.
ABSENT = {
    "access_programs", "image", "input_transformations", "moderation", "prompt_cache_diagnostics",
    "prompt_cache_options", "tool_usage",
}  # fmt: skip
TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def without_repeats(names: list[object]) -> list[object]:
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def without_names(value: object) -> object:
    """A reply without what differs each time it is asked for."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "call_id", "created_at", "completed_at")
    return {key: without_names(one) for key, one in value.items() if key not in changing}


def test_a_reply_has_every_field_of_the_sdk_s_response(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("Good day.", STOP)
        asked: JsonObject = {
            **HELLO, "model": "tiny", "store": True, "metadata": {"a": "b"}, "temperature": 0.5,
            "instructions": "Be kind.",
        }  # fmt: skip
        reply = await post_object(rig, PATH, asked)
        response = Response.model_validate(reply)
        assert set(Response.model_fields) - set(reply) == ABSENT
        assert response.output_text == "Good day."
        assert (response.status, response.error, response.incomplete_details) == (
            "completed", None, None
        )  # fmt: skip
        assert (response.temperature, response.metadata) == (0.5, {"a": "b"})
        assert reply["store"] is False, "nothing is stored, whatever is asked for"
        usage = response.usage
        assert usage is not None
        assert usage.input_tokens == len(rig.scheduler.submits[-1].token_ids)
        assert usage.output_tokens == len(TOKENIZER.encode("Good day."))
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert prompt_of(rig) == (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    run_generate(tmp_path, story)


def test_a_stream_tells_the_reply_in_the_order_of_openai_s_events(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(CALLED, STOP)
        asked: JsonObject = {
            **HELLO, "tools": [TOOL], "top_logprobs": 2, "include": ["message.output_text.logprobs"]
        }  # fmt: skip
        whole = await post_object(rig, PATH, asked)
        events = await typed_events(rig, PATH, asked)
        for event in events:
            EVENT.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert without_repeats([event["type"] for event in events]) == [
            "response.created", "response.in_progress", *TEXT_EVENTS, *CALL_EVENTS,
            "response.completed",
        ]  # fmt: skip
        assert at(events[0], "response", "status") == "in_progress"
        told = at(events[-1], "response")
        assert at(told, "output", 0, "content", 0, "text") == "Let me see."
        assert at(told, "output", 1, "arguments") == '{"city": "Oslo"}'
        deltas = [str(e["delta"]) for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "Let me see." and len(deltas) > 2
        whole_items, items = at(whole, "output"), at(told, "output")
        for several in (whole_items, items):
            assert isinstance(several, list)
            for item in several:
                for part in item.get("content", []):
                    entries = part.pop("logprobs")
                    assert entries and all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert without_names(items) == without_names(whole_items)
        ids = {str(at(item, "id")) for item in items} if isinstance(items, list) else set()
        assert {event["item_id"] for event in events if "item_id" in event} == ids

    run_generate(tmp_path, story, tool_call_parser="hermes")


def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(f"<think>\nI must look.\n</think>\n\n{CALLED}", STOP)
        asked: JsonObject = {**HELLO, "tools": [TOOL]}
        whole = await post_object(rig, PATH, asked)
        response = Response.model_validate(whole)
        thought, said, _ = response.output
        assert thought.type == "reasoning" and thought.content is not None
        assert [part.text for part in thought.content] == ["I must look."]
        assert said.type == "message" and response.output_text == "Let me see."
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 5
        events = await typed_events(rig, PATH, asked)
        for event in events:
            EVENT.validate_python(event)
        assert without_repeats([event["type"] for event in events]) == [
            "response.created", "response.in_progress", *REASONING_EVENTS, *TEXT_EVENTS,
            *CALL_EVENTS, "response.completed",
        ]  # fmt: skip
        deltas = [str(e["delta"]) for e in events if e["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == "I must look." and len(deltas) > 2
        told = at(events[-1], "response")
        assert without_names(at(told, "output")) == without_names(whole["output"])
        assert at(told, "usage") == whole["usage"]

    run_generate(tmp_path, story, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_output_that_was_cut_off_is_incomplete(is_streaming: bool, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("Good day to you.", STOP)
        asked: JsonObject = {**HELLO, "max_output_tokens": 3}
        if is_streaming:
            last = (await typed_events(rig, PATH, asked))[-1]
            assert last["type"] == "response.incomplete"
            reply = at(last, "response")
        else:
            reply = await post_object(rig, PATH, asked)
        assert at(reply, "status") == "incomplete"
        assert at(reply, "incomplete_details") == {"reason": "max_output_tokens"}
        assert at(reply, "output", 0, "status") == "incomplete"
        assert at(reply, "usage", "output_tokens") == 3

    run_generate(tmp_path, story)


@pytest.mark.slow
def test_a_failure_inside_a_stream_is_an_event_of_its_own(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
            asked = asyncio.create_task(
                client.responses.create(model="tiny", input="hello", stream=True)
            )
            await rig.until(lambda s: len(s.held) == 1)
            (number,) = rig.scheduler.held
            rig.scheduler.send(count_up(rig.scheduler.held[number])[0])
            events = aiter(await asked)
            assert (await anext(events)).type == "response.created"
            rig.scheduler.send(Failed(number, 500, "peer_lost", "gone"))
            last = [event async for event in events][-1]
            assert last.type == "response.failed"
            assert last.response.status == "failed" and last.response.error is not None
            assert last.response.error.message == "gone"
            await client.close()

    run_generate(tmp_path, story)


def test_a_failure_before_the_first_token_has_its_own_status(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda s: [Failed(s.request_id, 503, "queue_full", "full")]
        for is_streaming in (False, True):
            reply = await rig.http.post(PATH, json={**HELLO, "stream": is_streaming})
            assert reply.status_code == 503 and "retry-after" in reply.headers
            assert reply.json()["error"]["code"] == "queue_full"

    run_generate(tmp_path, story)


@pytest.mark.slow
def test_the_sdk_s_helpers_read_streams_and_schemas(tmp_path: Path) -> None:
    class Person(BaseModel):
        name: str

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text('{"name": "Ada"}', STOP)
        async with serve_http(rig) as served:
            client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
            parsed = await client.responses.parse(model="tiny", input="who", text_format=Person)
            assert parsed.output_parsed == Person(name="Ada")
            grammar = rig.scheduler.submits[-1].sampling.grammar
            assert grammar is not None and json.loads(grammar.text)["required"] == ["name"]
            async with client.responses.stream(model="tiny", input="who") as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_response()
            assert final.output_text == '{"name": "Ada"}' and "response.completed" in kinds
            await client.close()

    run_generate(tmp_path, story)


def test_a_prefill_server_answers_what_it_holds(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        asked: JsonObject = {**HELLO, "kv_transfer_params": {"do_remote_decode": True}}
        whole = await post_object(rig, PATH, asked)
        last = at((await typed_events(rig, PATH, asked))[-1], "response")
        for reply in (whole, last):
            assert at(reply, "kv_transfer_params", "do_remote_prefill") is True

    run_generate(tmp_path, story, role=Role.PREFILL)
