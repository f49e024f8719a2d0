"""The clients that agents are written with, against one real pair: OpenAI's Responses, Anthropic's
Messages, and LangChain. Answers, streams, structured output, and a loop with tools each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import anthropic
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseInputParam
from pydantic import BaseModel, Field, SecretStr

from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL = "checkpoint"
QUESTION = "Who is Ada?"
OPTIONS: dict[str, object] = {"seed": 3, "temperature": 0.8}
ENDLESS = {**OPTIONS, "ignore_eos": True}
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """What structured output is made of."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)


@dataclass
class Clients:
    openai: OpenAI
    anthropic: Anthropic
    langchain: ChatOpenAI


@pytest.fixture(scope="module")
def clients(fleet: Fleet) -> Iterator[Clients]:
    prefill = fleet.prefill()
    decode = fleet.decode([prefill], "--tool-call-parser", "hermes")
    fleet.wait_ready()
    base_url = f"{decode.url}/v1"
    langchain = ChatOpenAI(
        model=MODEL, base_url=base_url, api_key=SecretStr("any"), seed=3,
        max_retries=0, max_completion_tokens=24, temperature=0.8, stream_usage=True,
    )  # fmt: skip
    with (
        OpenAI(base_url=base_url, api_key="any", max_retries=0) as openai_client,
        Anthropic(base_url=decode.url, api_key="any", max_retries=0) as anthropic_client,
    ):
        yield Clients(openai_client, anthropic_client, langchain)


# ---- Responses -----------------------------------------------------------------------------------

FIND: FunctionToolParam = {
    "type": "function", "name": "find", "parameters": SCHEMA, "strict": True,
}  # fmt: skip


def test_responses_are_the_same_streamed_and_whole(clients: Clients) -> None:
    responses = clients.openai.responses
    whole = responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=12, store=False, extra_body=ENDLESS
    )
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    with responses.stream(
        model=MODEL, input=QUESTION, max_output_tokens=12, extra_body=ENDLESS
    ) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text != ""
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.output_tokens == 12


def test_a_response_fills_a_pydantic_model_in(clients: Clients) -> None:
    parsed = clients.openai.responses.parse(
        model=MODEL, input=QUESTION, text_format=Person, extra_body=OPTIONS
    ).output_parsed
    assert parsed is not None and 0 <= parsed.age <= 120


def test_a_loop_over_responses_goes_on_from_their_items(clients: Clients) -> None:
    responses = clients.openai.responses
    asked: ResponseInputParam = [{"role": "user", "content": QUESTION}]
    called = responses.create(
        model=MODEL, input=asked, tools=[FIND], tool_choice="required",
        parallel_tool_calls=False, extra_body=OPTIONS,
    )  # fmt: skip
    (call,) = called.output
    assert call.type == "function_call" and call.name == "find"
    assert set(json.loads(call.arguments)) == {"name"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Ada is a poet."}
    answer = responses.create(
        model=MODEL,
        input=[*asked, *[item.to_dict() for item in called.output], result],  # type: ignore[list-item]
        tools=[FIND],
        tool_choice="none",
        max_output_tokens=8,
    )
    assert answer.output_text and answer.usage is not None and called.usage is not None
    assert answer.usage.input_tokens > called.usage.input_tokens


def test_what_a_store_is_for_is_refused(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        clients.openai.responses.create(model=MODEL, input=QUESTION, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


# ---- Messages ------------------------------------------------------------------------------------

ASK: list[MessageParam] = [{"role": "user", "content": QUESTION}]
TOOL: ToolParam = {"name": "find", "input_schema": SCHEMA}


def test_messages_are_the_same_streamed_and_whole(clients: Clients) -> None:
    messages = clients.anthropic.messages
    whole = messages.create(
        model=MODEL, max_tokens=12, messages=ASK, system="Be kind.", extra_body=ENDLESS
    )
    assert whole.stop_reason == "max_tokens"
    with messages.stream(
        model=MODEL, max_tokens=12, messages=ASK, system="Be kind.", extra_body=ENDLESS
    ) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    for message in (whole, last):
        assert [block.text for block in message.content if block.type == "text"] == [text] != [""]
    assert last.usage.output_tokens == whole.usage.output_tokens == 12
    counted = messages.count_tokens(model=MODEL, messages=ASK, system="Be kind.").input_tokens
    for usage in (whole.usage, last.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


def test_a_loop_over_messages_goes_on_from_their_blocks(clients: Clients) -> None:
    messages = clients.anthropic.messages
    with messages.stream(
        model=MODEL, max_tokens=400, messages=ASK, tools=[TOOL], tool_choice={"type": "any"},
        extra_body=OPTIONS,
    ) as stream:  # fmt: skip
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    assert calls and all(set(call.input) == {"name"} for call in calls)
    loop: list[MessageParam] = [
        *ASK,
        called.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Ada is a poet."}
                for call in calls
            ],
        },
    ]
    answer = messages.create(
        model=MODEL, max_tokens=8, messages=loop, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert [block.type for block in answer.content] == ["text"]
    bare = messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    assert messages.count_tokens(model=MODEL, messages=loop).input_tokens > bare


def test_a_message_stops_where_it_is_told_to(clients: Clients) -> None:
    messages = clients.anthropic.messages
    (block,) = messages.create(model=MODEL, max_tokens=12, messages=ASK, extra_body=OPTIONS).content
    assert block.type == "text"
    word = block.text.split()[1]
    cut = messages.create(
        model=MODEL, max_tokens=12, messages=ASK, extra_body=OPTIONS, stop_sequences=[word]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)


def test_messages_have_the_errors_that_clients_catch(clients: Clients) -> None:
    messages = clients.anthropic.messages
    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="claude", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        messages.create(model=MODEL, max_tokens=20_000, messages=ASK)


# ---- LangChain -----------------------------------------------------------------------------------


@tool
def find(name: Annotated[str, Field(max_length=6)]) -> str:
    """Finds a person."""
    return f"{name} keeps the ring."


@pytest.fixture(params=["chat", "responses"])
def chat(request: pytest.FixtureRequest, clients: Clients) -> ChatOpenAI:
    """Over either API. The SDK's call for responses has no seed, so it is sent beside."""
    if request.param == "chat":
        return clients.langchain
    return clients.langchain.model_copy(
        update={"use_responses_api": True, "seed": None, "extra_body": {"seed": 3}}
    )


def test_a_stream_and_a_whole_answer_are_the_same(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    merged = AIMessageChunk("")
    for chunk in chat.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        merged += chunk  # type: ignore[assignment]
    assert merged.text == whole.text != ""
    counts, streamed = whole.usage_metadata, merged.usage_metadata
    assert counts is not None and streamed is not None
    assert 0 < counts["output_tokens"] <= 24
    assert counts["total_tokens"] == streamed["total_tokens"]


def test_questions_come_in_batches(chat: ChatOpenAI) -> None:
    answers = chat.batch([QUESTION, "Who is Selma?", QUESTION])
    assert answers[0].text == answers[2].text != answers[1].text


def test_structured_output_is_filled_in(chat: ChatOpenAI) -> None:
    longer = chat.model_copy(update={"max_tokens": 400})
    found = longer.with_structured_output(Person, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Person)


def test_an_agent_goes_on_from_its_own_calls(chat: ChatOpenAI) -> None:
    """The message with the calls has no content; LangChain sends null."""
    longer = chat.model_copy(update={"max_tokens": 400})
    called = longer.bind_tools([find], tool_choice="any").invoke(QUESTION)
    assert isinstance(called, AIMessage) and called.tool_calls, called
    results = [
        ToolMessage(find.invoke(call["args"]), tool_call_id=call["id"])
        for call in called.tool_calls
    ]
    loop = [HumanMessage(QUESTION), called, *results]
    answer = chat.bind_tools([find], tool_choice="none").invoke(loop)
    without = chat.invoke([HumanMessage(QUESTION)])
    assert answer.text
    told, bare = answer.usage_metadata, without.usage_metadata
    assert told is not None and bare is not None
    assert told["input_tokens"] > bare["input_tokens"], "calls and results are in the prompt"
