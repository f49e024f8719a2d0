"""The `system` and `messages` of /v1/messages: blocks of content become messages of a chat.

Results of tools, which a user's message brings here, are messages of their own there.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from msgspec import Meta

from common.errors import RequestError
from common.frontend.apis.as_chat import chat_content, text_parts
from common.frontend.bodies.body import Body, Json, Object, path, read, refusal, schema_of
from common.frontend.bodies.fields import JsonObject, JsonValue

# A block of the system's text in which Claude Code counts its own requests: with it, no two
# prompts would begin alike, and nothing of them could be kept. vLLM drops it too.
BILLING_PREFIX = "x-anthropic-billing-header"
TEXT_TYPES = ("text",)
MESSAGE_LIST = "a list of messages, not empty"

TEXT_BLOCK: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": [*TEXT_TYPES]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TEXT_BLOCKS: JsonObject = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_BLOCK}]}


class ContentBlock(Body, frozen=True, kw_only=True):
    """A text has text; thinking its thinking; a tool_use id, name and input; a tool_result
    tool_use_id and content."""

    type: Annotated[
        Literal["text", "thinking", "tool_use", "tool_result"],
        Meta(
            description='"text", "thinking", "tool_use" or "tool_result"; this server takes text '
            "only, and has no tools of its own"
        ),
    ]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object = {}
    tool_use_id: str | None = None
    content: Annotated[Json, Meta(extra_json_schema=TEXT_BLOCKS)] = None
    is_error: bool = False


CONTENT: JsonObject = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": schema_of(ContentBlock)}]
}


class TurnMessage(Body, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Json,
        Meta(description="a string, or a list of blocks", extra_json_schema=CONTENT),
    ]


MESSAGES = Meta(
    min_length=1, description=MESSAGE_LIST, extra_json_schema={"items": schema_of(TurnMessage)}
)


def read_messages(system: JsonValue, messages: list[JsonValue]) -> tuple[list[JsonObject], bool]:
    """The messages of a chat, and whether the last one is to be continued: it is the assistant's,
    a text alone.

    Raises: RequestError naming message and block.
    """
    found: list[JsonObject] = []
    if text := _system_text(system):
        found.append({"role": "system", "content": text})
    for index, one in enumerate(messages):
        where = f"messages[{index}]"
        message = read(TurnMessage, one, where)
        place = path(where, "content")
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        elif not isinstance(message.content, list):
            raise refusal(place, message.content, "a string, or a list of blocks")
        elif message.role == "assistant":
            found.append(_assistant(message.content, place))
        else:
            found += _turn(message.role, message.content, place)
    last = found[-1] if found else {}
    is_open = last.get("role") == "assistant" and "tool_calls" not in last
    return found, is_open and bool(last.get("content"))


def _system_text(system: JsonValue) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = text_parts(system, "system", TEXT_TYPES)
    return "\n".join(text for text in texts if not text.startswith(BILLING_PREFIX))


def _turn(role: str, blocks: list[JsonValue], where: str) -> list[JsonObject]:
    """What the user's side says, in its order: texts, and results of tools."""
    found: list[JsonObject] = []
    texts: list[str] = []

    def add_texts() -> None:
        if texts:
            found.append({"role": role, "content": chat_content(texts.copy())})
            texts.clear()

    for index, value in enumerate(blocks):
        place = f"{where}[{index}]"
        block = read(ContentBlock, value, place)
        if block.type == "text":
            texts.append(_given(block.text, path(place, "text")))
        elif block.type == "tool_result" and role == "user":
            add_texts()
            found.append(_result(block, place))
        else:
            raise _misplaced(block, role, place)
    add_texts()
    return found or [{"role": role, "content": ""}]


def _result(block: ContentBlock, where: str) -> JsonObject:
    content: JsonValue = block.content or ""
    if not isinstance(content, str):
        content = chat_content(text_parts(content, path(where, "content"), TEXT_TYPES))
    call_id = _given(block.tool_use_id, path(where, "tool_use_id"))
    result: JsonObject = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**result, "is_error": True} if block.is_error else result


def _assistant(blocks: list[JsonValue], where: str) -> JsonObject:
    """One message of what the model has thought, said and called."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonValue] = []
    for index, value in enumerate(blocks):
        place = f"{where}[{index}]"
        block = read(ContentBlock, value, place)
        match block.type:
            case "text":
                texts.append(_given(block.text, path(place, "text")))
            case "thinking":
                thoughts.append(_given(block.thinking, path(place, "thinking")))
            case "tool_use":
                calls.append(_call(block, place))
            case "tool_result":
                raise _misplaced(block, "assistant", place)
    message: JsonObject = {"role": "assistant"}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if texts or not calls:
        message["content"] = chat_content(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ContentBlock, where: str) -> JsonObject:
    name = _given(block.name, path(where, "name"))
    arguments = json.dumps(block.input, ensure_ascii=False)
    function: JsonObject = {"name": name, "arguments": arguments}
    return {"id": _given(block.id, path(where, "id")), "type": "function", "function": function}


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise refusal(name, None, "a string")
    return value


def _misplaced(block: ContentBlock, role: str, where: str) -> RequestError:
    name = path(where, "type")
    allowed = {
        "user": '"text" or "tool_result"',
        "system": '"text"',
        "assistant": '"text", "thinking" or "tool_use"',
    }[role]
    return refusal(name, block.type, f"{allowed} in a message of the {role}")
