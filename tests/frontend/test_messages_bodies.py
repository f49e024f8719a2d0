"""Bodies of /v1/messages: how blocks become messages of a chat, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anthropic.types import Message, MessageTokensCount

from common.errors import RequestError
from common.frontend.apis.messages_body import parse_messages
from common.frontend.apis.messages_input import read_messages
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import at, post_object, prompt_of, run_generate, say_text
from tests.frontend.tiny_tokenizers import CHATML, write_tokenizer

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
STOP = FinishReason(FinishKind.STOP)
USER: JsonObject = {"role": "user", "content": "hello"}
ASK: JsonObject = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
TOOL: JsonObject = {"name": "get_weather", "input_schema": {"type": "object"}}

LIMITS = Limits(vocab_size=400, request_token_max=512, is_prefill=False, model_names=("tiny",))
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


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
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"top_k": 0}, "top_k"),
    ],
)  # fmt: skip
def test_what_can_t_be_honoured_is_refused_by_the_client_s_own_name(
    tokenizer: Tokenizer, body: JsonObject, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages({**ASK, **body}, tokenizer, LIMITS, "name", Parsers())
    assert (caught.value.status, caught.value.field) == (400, field)
    assert caught.value.message.startswith(field)


def test_a_schema_that_can_t_be_followed_is_refused_by_its_name(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        form: JsonObject = {"type": "json_schema", "schema": {"type": "nil"}}
        reply = await post_object(rig, PATH, {**ASK, "output_config": {"format": form}}, 400)
        assert at(reply, "error", "type") == "invalid_request_error"
        message = str(at(reply, "error", "message"))
        assert message.startswith("output_config.format.schema: ")

    run_generate(tmp_path, story)
