"""The `input` of /v1/responses: items of a conversation become messages of a chat.

What a model has said in one turn is one message: its reasoning, its text and the calls after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from common.errors import RequestError
from common.frontend.apis.as_chat import chat_content, check_arguments, text_parts
from common.frontend.bodies.body import Body, Json, Refused, path, read, refusal, schema_of
from common.frontend.bodies.fields import JsonObject, JsonValue

INPUT = "a string, or a list of items, not empty"
SYSTEM_ROLES = ("system", "developer")  # templates know the first one only
UNFINISHED = ("in_progress", "incomplete")
TEXT_TYPES = ("input_text", "output_text", "text")
REASONING_TYPES = ("reasoning_text", "text")
SUMMARY_TYPES = ("summary_text",)


def parts_schema(*types: str) -> JsonObject:
    part: JsonObject = {
        "type": "object",
        "properties": {"type": {"enum": [*types]}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"type": "array", "items": part}


CONTENT: JsonObject = {"anyOf": [{"type": "string"}, parts_schema(*TEXT_TYPES, *REASONING_TYPES)]}


class Item(Body, frozen=True):
    """A message has role and content; a function_call call_id, name and arguments; its
    function_call_output call_id and output; reasoning has content or a summary."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Annotated[Json, Meta(extra_json_schema=CONTENT)] = None
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Annotated[Json, Meta(extra_json_schema=CONTENT)] = None
    summary: Annotated[
        list[Json], Meta(extra_json_schema={"items": parts_schema(*SUMMARY_TYPES)["items"]})
    ] = []
    encrypted_content: Refused = None


ITEMS: JsonObject = {"type": "array", "items": schema_of(Item), "minItems": 1}
INPUT_SCHEMA: JsonObject = {"anyOf": [{"type": "string", "minLength": 1}, ITEMS]}


def read_input(value: JsonValue, instructions: str) -> tuple[list[JsonObject], bool]:
    """The messages of a chat, and whether the last one is to be continued.

    Raises: RequestError naming the item.
    """
    messages: list[JsonObject] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str) and value:
        return [*messages, {"role": "user", "content": value}], False
    if not isinstance(value, list) or not value:
        raise refusal("input", value, INPUT)
    for index, one in enumerate(value):
        where = f"input[{index}]"
        item = read(Item, one, where)
        match item.type:
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                messages.append({"role": "assistant", "reasoning_content": _reasoning(item, where)})
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                messages.append(_output(item, where))
    is_open = item.type == "message" and item.role == "assistant" and item.status in UNFINISHED
    return [_finished(message) for message in messages], is_open


def _add_message(messages: list[JsonObject], item: Item, where: str) -> None:
    if item.role is None:
        raise refusal(path(where, "role"), None, 'given, as "user"')
    content = _content(item.content, path(where, "content"))
    last = messages[-1] if messages else {}
    if item.role in SYSTEM_ROLES:
        # Many templates take one message of the system, the first.
        if len(messages) == 1 and last["role"] == "system":
            last["content"] = f"{_text(last['content'])}\n\n{_text(content)}"
            return
        messages.append({"role": "system", "content": content})
    elif item.role == "assistant" and last.keys() == {"role", "reasoning_content"}:
        last["content"] = content
    else:
        messages.append({"role": item.role, "content": content})


def _add_call(messages: list[JsonObject], item: Item, where: str) -> None:
    given = _given({"call_id": item.call_id, "name": item.name}, where)
    arguments = check_arguments(item.arguments or "", path(where, "arguments"))
    function: JsonObject = {"name": given["name"], "arguments": arguments}
    call: JsonObject = {"id": given["call_id"], "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    calls = messages[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(call)


def _output(item: Item, where: str) -> JsonObject:
    given = _given({"call_id": item.call_id}, where)
    content = _content(item.output, path(where, "output"))
    return {"role": "tool", "tool_call_id": given["call_id"], "content": content}


def _reasoning(item: Item, where: str) -> str:
    """What was thought, or else what was said of it."""
    summary = text_parts([*item.summary], path(where, "summary"), SUMMARY_TYPES)
    if item.content is None:
        return "".join(summary)
    return "".join(text_parts(item.content, path(where, "content"), REASONING_TYPES))


def _content(value: JsonValue, where: str) -> JsonValue:
    return value if isinstance(value, str) else chat_content(text_parts(value, where, TEXT_TYPES))


def _text(content: JsonValue) -> str:
    if isinstance(content, str):
        return content
    assert isinstance(content, list), "a message has a text or parts"
    return "".join(str(part["text"]) for part in content if isinstance(part, dict))


def _given(fields: Mapping[str, str | None], where: str) -> dict[str, str]:
    """Raises: RequestError naming the first that is not given."""
    found: dict[str, str] = {}
    for key, value in fields.items():
        if not value:
            name = path(where, key)
            raise RequestError(f"{name}: must be given", field=name)
        found[key] = value
    return found


def _finished(message: JsonObject) -> JsonObject:
    """A message of the assistant without a text has an empty one, unless it has calls."""
    if "content" in message or "tool_calls" in message:
        return message
    return {**message, "content": ""}
