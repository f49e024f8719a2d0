"""Tables of `largest` for the bodies of /v1/responses and /v1/messages, which name alike what
others mean differently."""

from __future__ import annotations

from common.frontend.apis.messages_body import CLEAR_THINKING
from common.frontend.bodies.fields import JsonObject, JsonValue

TOOL_COUNT = 30  # as many as fit the prompt, where each has its parameters
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = "f" * 64
TEXT = "x" * 2048
OBJECT: JsonObject = {"type": "object"}
PART: JsonObject = {"type": "text", "text": "a"}
FLAT_TOOL: JsonObject = {"type": "function", "name": FUNCTION}
CUSTOM_TOOL: JsonObject = {"name": FUNCTION, "input_schema": OBJECT}

MEMBERS: dict[str, dict[str, JsonObject]] = {
    RESPONSES: {
        "input": {"role": "user", "content": [PART]},
        "input.content": PART,
        "input.output": PART,
        "input.summary": {"type": "summary_text", "text": "a"},
        "tools": FLAT_TOOL,
        "tool_choice": {**FLAT_TOOL, "mode": "auto", "tools": [FLAT_TOOL]},
        "tool_choice.tools": FLAT_TOOL,
        "text.format": {"type": "json_schema", "schema": OBJECT},
        # Of one field alone.
        "input/type": {"call_id": "c", "name": "f", "output": "a"},
        "input/arguments": {"type": "function_call", "call_id": "c", "name": "f"},
        "input/output": {"type": "function_call_output", "call_id": "c"},
        "input/summary": {"type": "reasoning"},
        "tool_choice/mode": {"type": "allowed_tools"},
        "tool_choice/tools": {"type": "allowed_tools"},
    },
    MESSAGES: {
        "messages.content.content": PART,
        "system": PART,
        "tools": CUSTOM_TOOL,
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled"},
        "output_config.format": {"type": "json_schema", "schema": OBJECT},
        "messages.content/content": {"type": "tool_result", "tool_use_id": "c"},
        "tool_choice/name": {"type": "tool"},
    },
}
"""What an object has beside the field, by its own path, or "/" and the name of one field."""

BESIDE: dict[str, dict[str, JsonObject]] = {
    RESPONSES: {"top_logprobs": {}, "tool_choice": {"tools": [FLAT_TOOL]}},
    MESSAGES: {"tool_choice": {"tools": [CUSTOM_TOOL]}},
}


def unbounded(path: str, text: str, schemas: list[JsonValue]) -> dict[str, list[JsonValue]]:
    """text: that fits a prompt."""
    arguments: list[JsonValue] = ["{}"]
    tools: dict[str, list[JsonValue]] = {
        "tools.description": [TEXT],
        "tools.parameters": [{**OBJECT, "description": TEXT}],
        "tools.input_schema": [{**OBJECT, "description": TEXT}],
        "metadata": [{"x": TEXT}],
    }
    match path:
        case "/v1/responses":
            flat: list[JsonValue] = [{**FLAT_TOOL, "name": f"f{i}"} for i in range(TOOL_COUNT)]
            names = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
            return {
                **tools,
                **{key: [TEXT] for key in names},
                "input": [text],
                "instructions": [text],
                "input.content": [text],
                "input.content.type": ["input_text", "output_text", "text"],
                "input.content.text": [text],
                "input.call_id": [TEXT],
                "input.name": [TEXT],
                "input.arguments": arguments,
                "input.output": [text],
                "input.output.type": ["input_text", "output_text", "text"],
                "input.output.text": [text],
                "input.summary.text": [text],
                "max_output_tokens": [2],
                "tools": [flat],
                "tool_choice.type": ["function"],
                "tool_choice.tools": [[FLAT_TOOL]],
                "text": [],  # an object, whose members are fields of their own
                "text.format.type": ["json_schema"],
                "text.format.name": [TEXT],
                "text.format.description": [TEXT],
                "text.format.schema": [schemas[0]],
                "reasoning.effort": [TEXT],
            }
        case "/v1/messages":
            own: list[JsonValue] = [{**CUSTOM_TOOL, "name": f"f{i}"} for i in range(TOOL_COUNT)]
            return {
                **tools,
                "messages.content.type": ["text"],
                "messages.content.thinking": [TEXT],
                "messages.content.id": [TEXT],
                "messages.content.name": [TEXT],
                "messages.content.tool_use_id": [TEXT],
                "messages.content.input": [{"x": TEXT}],
                "messages.content.content": [text],
                "messages.content.content.text": [text],
                "system": [text],
                "system.text": [text],
                "tools": [own],
                "tool_choice.type": ["auto", "any", "none"],
                "output_config.effort": [TEXT],
                "output_config.format.schema": [schemas[0]],
                "context_management.edits": [[{"type": CLEAR_THINKING, "keep": "all"}]],
            }
        case _:
            return {}
