"""Reasoning of a chat is told apart from its answer, streamed or not, as the body asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.frontend.bodies.fields import JsonObject
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    post_object,
    post_stream,
    run_generate,
    say_text,
)

PATH = "/v1/chat/completions"
HELLO: JsonObject = {"role": "user", "content": "hello"}
TOOL: JsonObject = {"type": "function", "function": {"name": "get_weather"}}
STOP = FinishReason(FinishKind.STOP)
THOUGHT = "<think>\nA fox, so 4.\n</think>"
SAID = f"{THOUGHT}\n\nIt is 4."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def deltas(events: list[JsonObject], key: str) -> list[str]:
    found = [at(event, "choices", 0, "delta") for event in events if event["choices"]]
    return [str(delta[key]) for delta in found if isinstance(delta, dict) and delta.get(key)]


def test_reasoning_is_a_member_of_its_own_and_counted(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(SAID, STOP)
        reply = await post_object(rig, PATH, {"messages": [HELLO]})
        message = at(reply, "choices", 0, "message")
        assert at(message, "content") == "It is 4."
        assert at(message, "reasoning_content") == "A fox, so 4." == at(message, "reasoning")
        count = len(TOKENIZER.encode(THOUGHT))
        assert at(reply, "usage", "completion_tokens_details") == {"reasoning_tokens": count}
        assert at(reply, "usage", "completion_tokens") == len(TOKENIZER.encode(SAID))

        options: JsonObject = {"stream_options": {"include_usage": True}}
        events = await post_stream(rig, PATH, {"messages": [HELLO], **options})
        for key in ("reasoning_content", "reasoning"):
            assert "".join(deltas(events, key)) == "A fox, so 4."
            assert len(deltas(events, key)) > 1
        assert "".join(deltas(events, "content")) == "It is 4."
        assert at(events[-1], "usage", "reasoning_tokens") == count

    run_generate(tmp_path, story, reasoning_parser="qwen3")


def test_a_body_says_how_reasoning_is_told(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(SAID, STOP)
        asked: JsonObject = {"messages": [HELLO]}
        whole = {**asked, "separate_reasoning": False}
        message = at(await post_object(rig, PATH, whole), "choices", 0, "message")
        assert (at(message, "content"), at(message, "reasoning_content")) == (SAID, None)
        held = await post_stream(rig, PATH, {**asked, "stream_reasoning": False})
        assert deltas(held, "reasoning_content") == ["A fox, so 4."]
        dropped = {**asked, "include_reasoning": False}
        reply = await post_object(rig, PATH, dropped)
        assert at(reply, "choices", 0, "message", "reasoning") is None
        assert at(reply, "choices", 0, "message", "content") == "It is 4."
        assert at(reply, "usage", "reasoning_tokens") == len(TOKENIZER.encode(THOUGHT))
        assert not deltas(await post_stream(rig, PATH, dropped), "reasoning_content")

    run_generate(tmp_path, story, reasoning_parser="auto")


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_a_template_that_closes_reasoning_leaves_all_to_the_answer(
    off: JsonObject, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(SAID, STOP)
        reply = await post_object(rig, PATH, {"messages": [HELLO], **off})
        prompt = TOKENIZER.decode(rig.scheduler.submits[-1].token_ids, skip_special_tokens=False)
        assert prompt.endswith("<think></think>")
        assert at(reply, "choices", 0, "message", "content") == SAID
        assert at(reply, "usage", "reasoning_tokens") == 0

    run_generate(tmp_path, story, reasoning_parser="deepseek-r1")


def test_an_output_may_begin_inside_reasoning_and_end_in_a_call(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(f"Oslo.\n</think>\n\nI look.\n{CALL}", STOP)
        asked: JsonObject = {"messages": [HELLO], "tools": [TOOL], "n": 2}
        for choice in ("auto", None):
            reply = await post_object(rig, PATH, {**asked, "tool_choice": choice})
            for index in range(2):
                message = at(reply, "choices", index, "message")
                assert at(message, "reasoning_content") == "Oslo."
                assert at(message, "content") == "I look."
                assert at(message, "tool_calls", 0, "function", "name") == "get_weather"
                assert at(reply, "choices", index, "finish_reason") == "tool_calls"
        unasked = await post_object(rig, PATH, {**asked, "tool_choice": "none"})
        message = at(unasked, "choices", 0, "message")
        assert at(message, "reasoning_content") == "Oslo."
        assert at(message, "content") == f"I look.\n{CALL}"

    run_generate(tmp_path, story, reasoning_parser="deepseek-r1", tool_call_parser="hermes")


def test_what_an_earlier_answer_thought_reaches_the_template(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        shown: list[str] = []
        earlier: JsonObject = {"role": "assistant", "content": "4"}
        for member in ("reasoning_content", "reasoning"):
            messages = [HELLO, {**earlier, member: "hm"}, HELLO]
            reply = await rig.http.post("/tokenize", json={"messages": messages})
            shown.append(TOKENIZER.decode(reply.json()["tokens"], skip_special_tokens=False))
        assert shown[0] == shown[1] and "<think>hm</think>4" in shown[0]

    run_generate(
        tmp_path,
        story,
        chat_template="{% for m in messages %}{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}|{% endfor %}",
    )


def test_generate_counts_reasoning_and_has_a_grammar_wait_for_its_end(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("A fox.</think>4", STOP)
        sampling: JsonObject = {"regex": "[0-9]", "max_new_tokens": 64}
        asked: JsonObject = {"text": "hello", "sampling_params": sampling}
        plain = await post_object(rig, "/generate", asked)
        assert at(plain, "meta_info", "reasoning_tokens") == 0
        free = rig.scheduler.submits[-1].sampling.grammar
        reasoned: JsonObject = {**asked, "require_reasoning": True}
        count = len(TOKENIZER.encode("A fox.</think>"))
        whole = await post_object(rig, "/generate", reasoned)
        assert at(whole, "meta_info", "reasoning_tokens") == count
        held = rig.scheduler.submits[-1].sampling.grammar
        assert free is not None and held is not None and free.text in held.text != free.text
        events = await post_stream(rig, "/generate", reasoned)
        for event in events:
            so_far = at(event, "meta_info", "completion_tokens")
            assert isinstance(so_far, int)
            assert at(event, "meta_info", "reasoning_tokens") == min(so_far, count)

    run_generate(tmp_path, story, reasoning_parser="qwen3")


def test_generate_can_not_find_reasoning_without_a_parser(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"text": "hello", "require_reasoning": True}
        reply = await post_object(rig, "/generate", body, 400)
        assert "--reasoning-parser" in str(reply)

    run_generate(tmp_path, story)


# ---- shapes --------------------------------------------------------------------------------------

# The members of their own models: vLLM's ChatCompletionResponse and SGLang's, and OpenAI's.
MESSAGE = {
    "role", "content", "refusal", "annotations", "audio", "function_call", "tool_calls",
    "reasoning", "reasoning_content",
}  # fmt: skip
CHOICE = {
    "index",
    "message",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "matched_stop",
    "token_ids",
}
REPLY = {
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
    "prompt_logprobs", "prompt_token_ids", "kv_transfer_params",
}  # fmt: skip
COMPLETION_CHOICE = {
    "index", "text", "logprobs", "finish_reason", "stop_reason", "matched_stop", "token_ids",
    "prompt_logprobs", "prompt_token_ids",
}  # fmt: skip


def test_answers_have_the_members_that_clients_of_sglang_and_vllm_read(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("It is 4.", STOP)
        reply = await post_object(rig, PATH, {"messages": [HELLO]})
        parsed = ChatCompletion.model_validate(reply)
        choice = parsed.choices[0]
        assert set(reply) >= REPLY and set(choice.model_dump()) >= CHOICE
        assert set(choice.message.model_dump()) == MESSAGE
        for name in MESSAGE - {"role", "content"}:  # none of them raises
            assert getattr(choice.message, name) is None
        assert parsed.usage is not None and parsed.usage.completion_tokens_details is not None
        whole = await post_object(rig, "/v1/completions", {"prompt": "hello"})
        completion = Completion.model_validate(whole)
        assert set(completion.choices[0].model_dump()) == COMPLETION_CHOICE
        assert {"service_tier", "system_fingerprint", "kv_transfer_params"} <= set(whole)

    run_generate(tmp_path, story)


def test_deltas_have_nothing_that_is_null(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(f"{SAID}{CALL}", STOP)
        for event in await post_stream(rig, PATH, {"messages": [HELLO], "tools": [TOOL]}):
            ChatCompletionChunk.model_validate(event)
            delta = at(event, "choices", 0, "delta")
            assert isinstance(delta, dict) and None not in delta.values()

    run_generate(tmp_path, story, reasoning_parser="auto", tool_call_parser="hermes")


def test_a_stop_that_the_client_named_is_told_as_vllm_does(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("It is 4. STOP", STOP)
        reply = await post_object(rig, PATH, {"messages": [HELLO], "stop": "STOP"})
        assert at(reply, "choices", 0, "stop_reason") == "STOP"
        for token_id, ids in ((7, [7]), (8, None)):
            rig.scheduler.answer = say_text("4", FinishReason(FinishKind.STOP, token_id))
            named = [7] if ids else []
            body: JsonObject = {"messages": [HELLO], "stop_token_ids": [*named]}
            reply = await post_object(rig, PATH, body)
            assert at(reply, "choices", 0, "matched_stop") == token_id
            assert at(reply, "choices", 0, "stop_reason") == (token_id if ids else None)

    run_generate(tmp_path, story)
