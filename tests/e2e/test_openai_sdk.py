"""OpenAI's own client against a real pair: what it asks for it gets, in its own types; and outputs
that must follow a grammar are the same from the pair as from one server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.e2e.fleet import Body, Fleet, Node

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL = "checkpoint"
PROMPT = "The code of Ada is"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Who is Ada?"}]
SEEDS = range(5)


class Person(BaseModel):
    """What the SDK makes a strict schema of."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)
    is_known: bool


SCHEMA = {**Person.model_json_schema(), "additionalProperties": False}
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@dataclass
class Pair:
    decode: Node
    alone: Node
    client: OpenAI


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Iterator[Pair]:
    prefill = fleet.prefill()
    # One prompt comes again and again, and every time its cache.
    every = ("--disable-radix-cache",)
    decode = fleet.decode([prefill], *every, "--tool-call-parser", "hermes")
    alone = fleet.decode([], name="alone")
    fleet.wait_ready()
    with OpenAI(base_url=f"{decode.url}/v1", api_key="any", max_retries=0) as client:
        yield Pair(decode, alone, client)


def test_the_model_is_listed(pair: Pair) -> None:
    assert [model.id for model in pair.client.models.list()] == [MODEL]


def test_completions_are_the_same_streamed_and_whole(pair: Pair) -> None:
    completions = pair.client.completions
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 0.8}
    whole = completions.create(**asked, logprobs=2, echo=True)
    chunks = list(completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text == PROMPT + "".join(c.choices[0].text for c in chunks[:-1])
    last = chunks[-1].usage
    assert chunks[-1].choices == [] and last is not None and whole.usage is not None
    # What was cached of the prompt differs: the second time, all may be.
    counts = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert counts == (last.prompt_tokens, last.completion_tokens, last.total_tokens)
    assert whole.usage.completion_tokens == 12
    told = whole.choices[0].logprobs
    assert told is not None and told.token_logprobs is not None and told.tokens is not None
    assert len(told.tokens) == whole.usage.total_tokens
    assert "".join(told.tokens) == whole.choices[0].text


def test_chats_are_the_same_streamed_and_whole(pair: Pair) -> None:
    chat = pair.client.chat.completions
    whole = chat.create(
        model=MODEL, messages=ASK, max_completion_tokens=12, seed=3, n=2,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    texts = ["", ""]
    with chat.stream(
        model=MODEL, messages=ASK, max_completion_tokens=12, seed=3, n=2
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                choice = event.chunk.choices[0]
                texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts
    assert texts[0] != texts[1]
    told = whole.choices[0].logprobs
    assert told is not None and told.content is not None
    assert b"".join(bytes(e.bytes or []) for e in told.content).decode() == texts[0]
    assert all(len(entry.top_logprobs) == 3 for entry in told.content)


def test_a_pydantic_model_comes_back_filled_in(pair: Pair) -> None:
    for seed in SEEDS[:2]:
        reply = pair.client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Person, seed=seed, temperature=0.5,
            max_completion_tokens=400,
        )  # fmt: skip
        person = reply.choices[0].message.parsed
        assert person is not None and 0 <= person.age <= 120


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_required_tools_are_called(pair: Pair, choice: object) -> None:
    found = set()
    for seed in SEEDS[:2]:
        asked = {
            "model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice, "seed": seed,
            "max_completion_tokens": 400, "parallel_tool_calls": False, "temperature": 0.5,
        }  # fmt: skip
        reply = pair.client.chat.completions.create(**asked)
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls or []
        found.add(call.function.name)
        if call.function.name == "find":
            Person.model_validate_json(call.function.arguments)
    with pair.client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.name == call.function.name
    assert streamed.function.arguments == call.function.arguments
    assert found <= ({"find"} if choice != "required" else {"find", "stop"})


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"json_schema": json.dumps(COMPACT)}, r"\{.*\}"),
        ({"regex": "[0-9]{3}-[a-z]{2,9}"}, r"[0-9]{3}-[a-z]{2,9}"),
        ({"ebnf": 'root ::= ("ja" | "nein") "!"+'}, r"(ja|nein)!+"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_pair_follows_a_grammar_as_one_server_does(
    pair: Pair, constraint: Body, pattern: str
) -> None:
    bodies: list[Body] = [
        {"text": PROMPT, "sampling_params": {**constraint, "seed": seed, "max_new_tokens": 200}}
        for seed in SEEDS
    ]
    paired = [pair.decode.generate(body) for body in bodies]
    assert [reply.output_ids for reply in paired] == [
        pair.alone.generate(body).output_ids for body in bodies
    ]
    for reply in paired:
        assert re.fullmatch(pattern, reply.text), reply.text
        assert reply.timeline.transfer.nbytes > 0
        if "json_schema" in constraint:
            Person.model_validate_json(reply.text)
    assert len({reply.text for reply in paired}) > 1


def test_errors_have_the_classes_that_clients_catch(pair: Pair) -> None:
    chat = pair.client.chat.completions
    with pytest.raises(openai.NotFoundError) as missing:
        chat.create(model="gpt-4", messages=ASK)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as bad:
        chat.create(model=MODEL, messages=ASK, temperature=9e99)
    assert bad.value.param == "temperature"
    bad_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nil"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(model=MODEL, messages=ASK, response_format=bad_schema)  # type: ignore[arg-type]
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError) as long:
        pair.client.completions.create(model=MODEL, prompt=[5] * 3000)
    assert long.value.param == "prompt"
