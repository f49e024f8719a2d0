"""What LiteLLM 1.106.2 has sent to this server as four of its providers, sent again.

It needs an older openai than our other tests, so it can't be installed beside them. Recorded from
`litellm.completion(model, messages, tools)` with the models `openai/tiny`, `hosted_vllm/tiny`,
`anthropic/tiny` and `openai/responses/tiny`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.frontend.bodies.fields import JsonObject, JsonValue
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import at, post_object, prompt_of, run_generate, say_text

STOP = FinishReason(FinishKind.STOP)
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
}
FUNCTION: JsonObject = {"name": "find", "description": "d", "parameters": SCHEMA}
QUESTION = "Who is Ada?"
RESULT = "Ada keeps the ring."
CHAT: JsonObject = {
    "model": "tiny",
    "max_tokens": 16,
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "find", "arguments": '{"name":"Ada"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
    ],
}
MESSAGES: JsonObject = {
    "model": "tiny",
    "max_tokens": 16,
    "tools": [{"name": "find", "input_schema": SCHEMA, "type": "custom", "description": "d"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "call_1", "name": "find", "input": {"name": "Ada"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}],
        },
    ],
}
RESPONSES: JsonObject = {
    "model": "tiny",
    "max_output_tokens": 16,
    "tools": [{**FUNCTION, "strict": None, "type": "function"}],
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": QUESTION}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "find",
            "arguments": '{"name":"Ada"}',
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": RESULT}],
        },
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", CHAT, ("choices", 0, "message", "content")),
        ("/v1/messages", MESSAGES, ("content", 0, "text")),
        ("/v1/responses", RESPONSES, ("output", 0, "content", 0, "text")),
    ],
)
def test_a_loop_with_tools_is_one_prompt_over_all_apis(
    tmp_path: Path, path: str, body: JsonObject, text: tuple[str | int, ...]
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("Ada.", STOP)
        assert at(await post_object(rig, path, body), *text) == "Ada."
        assert prompt_of(rig).endswith(
            f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            f"<|im_start|>tool\n{RESULT}<|im_end|>\n<|im_start|>assistant\n"
        )

    run_generate(tmp_path, story, tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("path", "body", "forced"),
    [
        ("/v1/chat/completions", CHAT, "required"),
        ("/v1/messages", MESSAGES, {"type": "any"}),
        ("/v1/responses", RESPONSES, "required"),
    ],
)
def test_a_forced_call_is_asked_for_alike(
    tmp_path: Path, path: str, body: JsonObject, forced: JsonValue
) -> None:
    async def story(rig: Rig) -> None:
        asked: JsonObject = {**body, "tool_choice": forced, "stream": False}
        await post_object(rig, path, asked)
        grammar = rig.scheduler.submits[-1].sampling.grammar
        assert grammar is not None
        assert '"maxLength":6' in grammar.text and '"const":"find"' in grammar.text

    run_generate(tmp_path, story, tool_call_parser="hermes")
