"""/v1/chat/completions: messages go through the checkpoint's template, replies are OpenAI's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.config import Role
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.protocol.frontend import Failed
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.generate_rig import (
    PARTS,
    TOKENIZER,
    VOCAB_SIZE,
    at,
    counted_text,
    post_object,
    post_stream,
    run_generate,
    say_text,
)
from tests.frontend.tiny_tokenizers import write_tokenizer

PATH = "/v1/chat/completions"
HELLO: JsonObject = {"role": "user", "content": "hello"}
TOOL: JsonObject = {"type": "function", "function": {"name": "f"}}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = TOKENIZER.encode(PROMPT, add_special_tokens=False)


def prompt_of(rig: Rig) -> str:
    return TOKENIZER.decode(rig.scheduler.submits[-1].token_ids, skip_special_tokens=False)


def test_a_chat_has_openai_s_fields(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(
            rig, PATH, {"model": "tiny", "messages": [HELLO], "max_tokens": 3}
        )
        assert rig.scheduler.submits[0].token_ids == PROMPT_IDS
        assert str(reply["id"]).startswith("chatcmpl-")
        assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")
        assert reply["choices"] == [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": counted_text(PROMPT_IDS, 3),
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                    "reasoning_content": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
                "stop_reason": None,
                "token_ids": None,
            }
        ]
        assert at(reply, "usage", "total_tokens") == len(PROMPT_IDS) + 3

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 9}, 4),
        ({}, 512 - len(PROMPT_IDS)),
        ({"max_tokens": None}, 512 - len(PROMPT_IDS)),
    ],
)
def test_both_names_bound_the_output_and_none_fills_the_context(
    limits: JsonObject, count: int, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        await post_object(rig, PATH, {"messages": [HELLO], **limits})
        assert rig.scheduler.submits[0].sampling.max_new_tokens == count

    run_generate(tmp_path, story)


def test_content_may_be_parts_and_null_beside_tool_calls(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        parts: JsonValue = [{"type": "text", "text": "hello"}]
        await post_object(
            rig, PATH, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        )
        assert prompt_of(rig) == PROMPT

    run_generate(tmp_path, story)


def test_tool_calls_reach_a_template_as_objects(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        call: JsonObject = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": '{"x": 1}'},
        }
        messages: list[JsonValue] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ]
        await post_object(rig, PATH, {"messages": messages, "max_tokens": 1})
        assert prompt_of(rig) == "f:1;2"

    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
        "{{ c.function.arguments.x }};{% endfor %}{{ m.content or '' }}{% endfor %}"
    )
    chat = write_tokenizer(tmp_path / "calls", chat_template=source)
    run_with_rig(tmp_path, story, parts=PARTS, tokenizer_path=str(chat))


def test_tools_are_shown_to_the_template_unless_none_is_wanted(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"messages": [HELLO], "max_tokens": 1, "tools": [TOOL]}
        wanted: list[JsonObject] = [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}]
        for extra in wanted:
            await post_object(rig, PATH, {**body, **extra})
            shown = '<|im_start|>system\n{"type": "function", "function": {"name": "f"}}<|im_end|>'
            assert prompt_of(rig).startswith(shown)
        unwanted: list[JsonObject] = [{"tool_choice": "none"}, {"tools": []}, {"tools": None}]
        for extra in unwanted:
            await post_object(rig, PATH, {**body, **extra})
            assert prompt_of(rig) == PROMPT

    run_generate(tmp_path, story)


def test_template_options_are_passed_on(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"messages": [HELLO], "max_tokens": 1}
        await post_object(rig, PATH, {**body, "chat_template_kwargs": {"enable_thinking": False}})
        assert prompt_of(rig) == PROMPT + "<think></think>"
        await post_object(rig, PATH, {**body, "add_generation_prompt": False})
        assert prompt_of(rig) == "<|im_start|>user\nhello<|im_end|>\n"
        await post_object(rig, PATH, {**body, "continue_final_message": True})
        assert prompt_of(rig) == "<|im_start|>user\nhello"

    run_generate(tmp_path, story)


def test_a_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"messages": [HELLO]}, 400)
        assert "no chat template" in str(at(reply, "error", "message"))

    run_with_rig(tmp_path, story, parts=PARTS)


# ---- log-probabilities and streams ---------------------------------------------------------------


def test_log_probabilities_tell_tokens_by_text_and_bytes(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("🚀!")
        body: JsonObject = {
            "messages": [HELLO],
            "max_tokens": 64,
            "logprobs": True,
            "top_logprobs": 1,
        }
        reply = await post_object(rig, PATH, body)
        content = at(reply, "choices", 0, "logprobs", "content")
        assert isinstance(content, list)
        ids = TOKENIZER.encode("🚀!")
        assert [entry["logprob"] for entry in content] == [-i / 8 for i in ids]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "🚀!"
        assert content[-1]["token"] == "!"
        first = {"token": "<|endoftext|>", "bytes": list(b"<|endoftext|>"), "logprob": 0.0}
        assert all(entry["top_logprobs"] == [first] for entry in content)

    run_generate(tmp_path, story)


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_stream_tells_role_then_text_then_reason(has_logprobs: bool, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("naïve 🚀 STOP it")
        body: JsonObject = {
            "messages": [HELLO],
            "max_tokens": 64,
            "stop": "STOP",
            "logprobs": has_logprobs,
        }
        first, *middle, last = await post_stream(rig, PATH, body)
        assert at(first, "choices", 0, "delta") == {"role": "assistant", "content": ""}
        assert at(first, "object") == "chat.completion.chunk"
        assert at(last, "choices", 0, "delta") == {}
        assert at(last, "choices", 0, "finish_reason") == "stop"
        assert at(last, "choices", 0, "matched_stop") == "STOP"
        text = "".join(str(at(event, "choices", 0, "delta", "content")) for event in middle)
        assert text == "naïve 🚀 "
        told: list[bytes] = []
        for event in middle:
            assert at(event, "choices", 0, "finish_reason") is None
            logprobs = at(event, "choices", 0, "logprobs")
            assert (logprobs is not None) == has_logprobs
            if isinstance(logprobs, dict):
                told += [bytes(entry["bytes"]) for entry in logprobs["content"]]
        if has_logprobs:
            assert b"".join(told).startswith(text.encode())
            assert len(b"".join(told[:-1])) < len(text.encode())
        assert all("usage" not in event for event in (first, *middle, last))

    run_generate(tmp_path, story)


def test_samples_stream_side_by_side_with_usage_at_the_end(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        options: JsonObject = {"include_usage": True, "continuous_usage_stats": True}
        body: JsonObject = {"messages": [HELLO], "n": 2, "max_tokens": 3}
        *chunks, last = await post_stream(rig, PATH, {**body, "stream_options": options})
        texts = ["", ""]
        for chunk in chunks:
            index = at(chunk, "choices", 0, "index")
            assert isinstance(index, int) and "usage" in chunk
            delta = at(chunk, "choices", 0, "delta")
            assert isinstance(delta, dict)
            texts[index] += str(delta.get("content", ""))
        assert texts == [counted_text(PROMPT_IDS, 3)] * 2
        assert last["choices"] == []
        assert at(last, "usage", "completion_tokens") == 6
        assert at(last, "usage", "prompt_tokens") == len(PROMPT_IDS)

    run_generate(tmp_path, story)


def test_a_failure_is_openai_s_error(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda s: [Failed(s.request_id, 500, "peer_lost", "gone")]
        for is_streaming in (False, True):
            body: JsonObject = {"messages": [HELLO], "stream": is_streaming}
            reply = await post_object(rig, PATH, body, 500)
            assert at(reply, "error", "code") == "peer_lost"

    run_generate(tmp_path, story)


def test_an_abort_is_a_finish_reason(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        asked = asyncio.create_task(post_object(rig, PATH, {"messages": [HELLO], "rid": "c"}))
        await rig.until(lambda s: len(s.held) == 1)
        await rig.http.post("/abort_request", json={"rid": "c"})
        reply = await asked
        assert (reply["id"], at(reply, "choices", 0, "finish_reason")) == ("c", "abort")

    run_generate(tmp_path, story)


def test_a_router_s_samples_have_a_room_each(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "messages": [HELLO],
            "model": "unknown",
            "n": 2,
            "bootstrap_host": ["h", "h"],
            "bootstrap_port": [None, None],
            "bootstrap_room": [2**62 + 1, 2**62 + 3],
        }
        reply = await post_object(rig, PATH, body)
        rooms = [s.bootstrap.room for s in rig.scheduler.submits if s.bootstrap]
        assert rooms == [2**62 + 1, 2**62 + 3]
        assert at(reply, "usage", "completion_tokens") == 2

    run_generate(tmp_path, story, role=Role.PREFILL)


# ---- bad input -----------------------------------------------------------------------------------

IMAGE: JsonObject = {"type": "image_url", "image_url": {"url": "x"}}
BAD_BODIES: list[tuple[JsonObject, str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    ({"messages": [HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "a", "content": "", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "a", "content": "", "tool_calls": [5]}]},
     "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"n": 0}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"tools": {"a": 1}}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice.function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "nil"}}}],
      "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"seed": "x"}, "seed"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.remote_engine_id"),
    ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
]  # fmt: skip


def test_bad_input_is_a_400_that_names_its_field(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for body, field in BAD_BODIES:
            reply = await rig.http.post(PATH, json={"messages": [HELLO], **body})
            assert reply.status_code == 400, (body, reply.text)
            error = reply.json()["error"]
            assert error["param"] == field, (body, error)
            assert field in error["message"] and error["type"] == "invalid_request_error"
        assert rig.scheduler.submits == []

    run_generate(tmp_path, story)


def test_a_model_that_is_not_served_is_a_404(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"messages": [HELLO], "model": "gpt-4"}, 404)
        assert at(reply, "error", "code") == "model_not_found"

    run_generate(tmp_path, story)
