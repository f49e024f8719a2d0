"""Tools of a chat: calls are told apart from text, streamed or not, and forced where required."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from common.errors import GrammarError
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.grammar import GrammarCompiler
from common.request import FinishKind, FinishReason, Grammar, GrammarKind
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    post_object,
    post_stream,
    run_generate,
    say_text,
)
from tests.frontend.tiny_tokenizers import byte_level_backend

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
PATH = "/v1/chat/completions"
HELLO: JsonObject = {"role": "user", "content": "hello"}
TOOL: JsonObject = {"type": "function", "function": {"name": "get_weather"}}
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
TAGGED = f"Let me see.\n<tool_call>\n{OSLO}\n</tool_call>"
STOP = FinishReason(FinishKind.STOP)


def test_calls_are_told_apart_from_text_as_the_server_was_asked_to(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(TAGGED, STOP)
        asked: JsonObject = {"messages": [HELLO], "tools": [TOOL]}
        choice = at(await post_object(rig, PATH, asked), "choices", 0)
        assert at(choice, "finish_reason") == "tool_calls"
        assert at(choice, "message", "content") == "Let me see."
        call = at(choice, "message", "tool_calls", 0)
        assert at(call, "type") == "function" and str(at(call, "id")).startswith("call_")
        assert at(call, "function") == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}

        plain: JsonObject = {"messages": [HELLO]}
        unasked: list[JsonObject] = [plain, {**asked, "tool_choice": "none"}]
        for body in unasked:
            choice = at(await post_object(rig, PATH, body), "choices", 0)
            assert at(choice, "message", "content") == TAGGED
            assert at(choice, "message", "tool_calls") is None
            assert at(choice, "finish_reason") == "stop"

    run_generate(tmp_path, story, tool_call_parser="hermes")


def test_streamed_calls_come_whole_and_once(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(TAGGED, STOP)
        asked: JsonObject = {"messages": [HELLO], "tools": [TOOL], "n": 2, "logprobs": True}
        events = await post_stream(rig, PATH, asked)
        for index in range(2):
            own = [at(e, "choices", 0) for e in events if at(e, "choices", 0, "index") == index]
            deltas = [at(choice, "delta") for choice in own]
            assert all(isinstance(delta, dict) for delta in deltas)
            texts = [str(d["content"]) for d in deltas if isinstance(d, dict) and "content" in d]
            assert "".join(texts) == "Let me see."
            (calls,) = [
                d["tool_calls"] for d in deltas if isinstance(d, dict) and "tool_calls" in d
            ]
            assert at(calls, 0, "index") == 0
            assert at(calls, 0, "function", "arguments") == '{"city": "Oslo"}'
            assert at(own[-1], "finish_reason") == "tool_calls"
            entries = [
                at(choice, "logprobs", "content") for choice in own if at(choice, "logprobs")
            ]
            assert sum(len(e) for e in entries if isinstance(e, list)) == len(
                TOKENIZER.encode(TAGGED)
            )

    run_generate(tmp_path, story, tool_call_parser="hermes")


SPECIAL = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
           "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|other|>")  # fmt: skip


def test_markers_that_are_special_tokens_are_seen_and_not_told(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    begin, end, one, argument, last, other = SPECIAL
    call = f'{one}functions.get_weather:0{argument}{{"city": "Oslo"}}{last}'
    said = say_text(f"I look.{other}{begin}{call}{end}", STOP, Tokenizer(backend, None))

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = said
        earlier: JsonObject = {"role": "assistant", "content": "", "tool_calls": [{}, {}]}
        asked: JsonObject = {"messages": [HELLO, earlier, HELLO], "tools": [TOOL]}
        message = at(await post_object(rig, PATH, asked), "choices", 0, "message")
        assert at(message, "content") == "I look."
        assert at(message, "tool_calls", 0, "id") == "functions.get_weather:2"
        assert at(message, "tool_calls", 0, "function", "arguments") == '{"city": "Oslo"}'
        unasked = await post_object(rig, PATH, {"messages": [HELLO]})
        assert "<|" not in str(at(unasked, "choices", 0, "message", "content"))

    run_generate(tmp_path, story, tool_call_parser="kimi_k2", backend=backend)


def test_no_second_call_is_told_where_they_may_not_be_parallel(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(f"{TAGGED}\n{TAGGED}", STOP)
        asked: JsonObject = {"messages": [HELLO], "tools": [TOOL]}
        for is_parallel, count in ((True, 2), (False, 1)):
            body = {**asked, "parallel_tool_calls": is_parallel}
            reply = await post_object(rig, PATH, body)
            calls = at(reply, "choices", 0, "message", "tool_calls")
            assert isinstance(calls, list) and len(calls) == count
            events = await post_stream(rig, PATH, body)
            deltas = [at(event, "choices", 0, "delta") for event in events]
            assert sum("tool_calls" in d for d in deltas if isinstance(d, dict)) == count

    run_generate(tmp_path, story, tool_call_parser="hermes")


def test_allowed_tools_are_the_only_ones_that_are_shown_and_called(tmp_path: Path) -> None:
    other: JsonObject = {"type": "function", "function": {"name": "rm"}}

    async def story(rig: Rig) -> None:
        def asked(mode: str, *names: str) -> JsonObject:
            tools: list[JsonValue] = [
                {"type": "function", "function": {"name": name}} for name in names
            ]
            choice: JsonObject = {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": tools},
            }
            return {"messages": [HELLO], "tools": [TOOL, other], "tool_choice": choice}

        rig.scheduler.answer = say_text(TAGGED, STOP)
        reply = await post_object(rig, PATH, asked("auto", "get_weather"))
        assert at(reply, "choices", 0, "finish_reason") == "tool_calls"
        prompt = TOKENIZER.decode(rig.scheduler.submits[-1].token_ids)
        assert "get_weather" in prompt and "rm" not in prompt
        reply = await post_object(rig, PATH, asked("auto", "rm"))
        assert at(reply, "choices", 0, "message", "content") == TAGGED
        await post_object(rig, PATH, asked("required", "rm"))
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None and "get_weather" not in grammar.text
        refused = await post_object(rig, PATH, asked("auto", "ls"), 400)
        assert "ls" in str(refused) and "allowed_tools" in str(refused)
        nothing = await post_object(rig, PATH, asked("required"), 400)
        assert "tool_choice" in str(nothing)

    run_generate(tmp_path, story, tool_call_parser="hermes")


@pytest.mark.parametrize("parser", ["", "hermes"])
def test_a_required_call_is_forced_by_a_grammar(tmp_path: Path, parser: str) -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/city"}},
        "$defs": {"city": {"enum": ["Oslo"]}},
    }
    move: JsonObject = {"type": "function", "function": {"name": "move", "parameters": schema}}

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text('[{"name": "move", "parameters": {"to": "Oslo"}}]', STOP)
        named: JsonObject = {"type": "function", "function": {"name": "move"}}
        asked: JsonObject = {"messages": [HELLO], "tools": [TOOL, move]}
        for choice, names in (("required", ["get_weather", "move"]), (named, ["move"])):
            reply = await post_object(rig, PATH, {**asked, "tool_choice": choice})
            message = at(reply, "choices", 0, "message")
            assert at(message, "content") is None
            assert at(message, "tool_calls", 0, "function") == {
                "name": "move", "arguments": '{"to": "Oslo"}'
            }  # fmt: skip
            grammar = rig.scheduler.submits[-1].sampling.grammar
            assert grammar is not None
            forced = json.loads(grammar.text)
            allowed = [one["properties"]["name"]["const"] for one in forced["items"]["anyOf"]]
            assert allowed == names
            moved = forced["$defs"]["move"]
            assert moved["properties"]["to"]["$ref"] == "#/$defs/move/$defs/city"
            assert moved["$defs"]["city"] == {"enum": ["Oslo"]}
            assert forced.get("maxItems") == (None if choice == "required" else 1)

    run_generate(tmp_path, story, tool_call_parser=parser)


def test_strict_tools_are_held_to_their_schema_between_tags(tmp_path: Path) -> None:
    cities: JsonObject = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    strict: JsonObject = {
        "type": "function",
        "function": {"name": "get_city", "strict": True, "parameters": cities},
    }

    async def story(rig: Rig) -> None:
        asked: JsonObject = {"messages": [HELLO], "tools": [strict, TOOL], "max_tokens": 1}
        await post_object(rig, PATH, asked)
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None
        tokenizer = load_tokenizer(str(CHECKPOINT), lambda: 0.0)
        vocab_size = tokenizer.vocab_size
        compiler = GrammarCompiler(str(CHECKPOINT), vocab_size, [0], thread_count=1)
        called = call_text("get_weather", {"a": 1})
        for text, is_allowed in (
            ("It is warm < here.", True),
            (call_text("get_city", {"city": "Oslo"}), True),
            (f"Wait.{called} and{call_text('get_city', {'city': 'Bonn'})}", True),
            (call_text("get_city", {"city": "Rome"}), False),
            (call_text("rm", {}), False),
        ):
            token_ids = tokenizer.encode(text)
            if is_allowed:
                compiler.start(grammar, token_ids)
            else:
                with pytest.raises(GrammarError):
                    compiler.start(grammar, token_ids)

        free: list[JsonObject] = [{"tools": [TOOL]}, {"tool_choice": "none"}]
        for changes in free:
            await post_object(rig, PATH, {**asked, **changes})
            assert rig.scheduler.submits[-1].sampling.grammar is None
        await post_object(rig, PATH, {**asked, "regex": "a+"})
        other = rig.scheduler.submits[-1].sampling.grammar
        assert other == Grammar(GrammarKind.REGEX, "a+")

    run_generate(tmp_path, story, tool_call_parser="hermes")


def call_text(name: str, arguments: JsonObject) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"
