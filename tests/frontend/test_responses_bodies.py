"""Bodies of /v1/responses: how items become messages of a chat, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types.responses import Response

from common.errors import RequestError
from common.frontend.apis.responses_body import parse_responses
from common.frontend.apis.responses_input import read_input
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import at, post_object, prompt_of, run_generate, say_text
from tests.frontend.tiny_tokenizers import CHATML, write_tokenizer

PATH = "/v1/responses"
STOP = FinishReason(FinishKind.STOP)
HELLO: JsonObject = {"input": "hello"}
TOOL: JsonObject = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
LIMITS = Limits(vocab_size=400, request_token_max=512, is_prefill=False, model_names=("tiny",))
TURN: list[JsonValue] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "I must look."}
    ], "encrypted_content": None},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    ]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "g", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "fair"},
    {"type": "function_call_output", "call_id": "c2", "output": [
        {"type": "input_text", "text": "5 C"}
    ]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


def test_one_turn_of_the_model_is_one_message_with_its_calls() -> None:
    messages, is_open = read_input(TURN, "Be kind.")
    assert messages == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning_content": "I must look.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "fair"},
        {"role": "tool", "tool_call_id": "c2", "content": "5 C"},
    ]
    assert not is_open


def test_a_message_that_was_not_finished_is_continued(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        begun: JsonObject = {"role": "assistant", "content": "Good", "status": "incomplete"}
        asked: JsonObject = {"input": [{"role": "user", "content": "hi"}, begun]}
        await post_object(rig, PATH, {**asked, "max_output_tokens": 1})
        assert prompt_of(rig).endswith("<|im_start|>assistant\nGood")

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "stop"]),
        ({"type": "function", "name": "stop"}, ["stop"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "stop"}],
            },
            ["stop"],
        ),
    ],
)
def test_calls_are_forced_as_in_a_chat(tmp_path: Path, choice: JsonValue, names: list[str]) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text('[{"name": "stop", "parameters": {}}]', STOP)
        tools: list[JsonValue] = [TOOL, {"type": "function", "name": "stop", "parameters": None}]
        asked: JsonObject = {**HELLO, "tools": tools, "tool_choice": choice}
        reply = await post_object(rig, PATH, asked)
        (item,) = Response.model_validate(reply).output
        assert item.type == "function_call"
        assert (item.name, item.arguments) == ("stop", "{}") and item.call_id.startswith("call_")
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None
        forced = json.loads(grammar.text)["items"]["anyOf"]
        assert [one["properties"]["name"]["const"] for one in forced] == names

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}]},
         "input[0].arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
         "input[0].encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 40}, "max_output_tokens"),
        ({"input": "a" * 90_000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"include": ["all"]}, "include"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"temperature": -1}, "temperature"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)  # fmt: skip
def test_what_can_t_be_honoured_is_refused_by_the_client_s_own_name(
    tokenizer: Tokenizer, body: JsonObject, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_responses({**HELLO, **body}, tokenizer, LIMITS, "name", Parsers())
    assert (caught.value.status, caught.value.field) == (400, field)
    assert caught.value.message.startswith(field)


def test_a_schema_that_can_t_be_followed_is_refused_by_its_name(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        form: JsonObject = {"type": "json_schema", "name": "n", "schema": {"type": "nil"}}
        reply = await post_object(rig, PATH, {**HELLO, "text": {"format": form}}, 400)
        assert at(reply, "error", "param") == "text.format.schema"

    run_generate(tmp_path, story)


def test_a_model_that_is_not_served_is_not_found(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {**HELLO, "model": "gpt-9"}, 404)
        assert at(reply, "error", "code") == "model_not_found"

    run_generate(tmp_path, story)
