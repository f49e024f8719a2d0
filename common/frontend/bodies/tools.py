"""The tools of a chat: the template's view of them, and the form that they ask of the output.

A call that is required is forced by a grammar: a JSON list of {"name", "parameters"}, each with the
parameters' own schema, whatever format the model was trained on. Calls that a model makes unasked
are looked for as `--tool-call-parser` says; where it says tags, a grammar holds the text
between them to the schemas of strict tools. Knows nothing of templates or replies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import Body, Json, Object, nested, read, refusal, schema_of
from common.frontend.bodies.constraints import ANY_OBJECT, Constraint, lark_grammar, schema_grammar
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.text.tool_calls import CLOSING, OPENING, ToolFormat
from common.grammar import STYLE_KEY, WHITESPACE

TOOL_COUNT_MAX = 128  # OpenAI's
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}

# ---- fields --------------------------------------------------------------------------------------

# OpenAI's, and the dot that others allow. In Python "$" also matches before a last newline.
NAME = Meta(
    pattern=r"^[A-Za-z0-9_.-]{1,64}(?!\n)$", description="1..64 letters, digits, '_', '-' or '.'"
)


class NamedFunction(Body, frozen=True):
    name: Annotated[str, NAME]


class Function(NamedFunction, frozen=True):
    strict: bool = False
    parameters: Object = msgspec.field(default_factory=NO_PARAMETERS.copy)


class NamedTool(Body, frozen=True):
    type: Literal["function"]
    function: Annotated[Object, nested(NamedFunction)]


class Tool(Body, frozen=True, kw_only=True):
    type: Literal["function"] = "function"
    function: Annotated[Object, nested(Function)]


TOOL: JsonObject = {"items": schema_of(Tool)}
TOOL_CHOICE: JsonObject = {"anyOf": [{"enum": ["none", "auto", "required"]}, schema_of(NamedTool)]}


class ToolFields(Body, frozen=True):
    """Of bodies that are made a prompt of by a template."""

    tools: Annotated[list[Json], Meta(max_length=TOOL_COUNT_MAX, extra_json_schema=TOOL)] = []
    tool_choice: Annotated[Json, Meta(extra_json_schema=TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True


# ---- readers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: the tools for the template. format: how the output writes calls, None: not at all.

    names: of the tools that may be called. constraint: forces a call if `is_forced`, else only the
        form of a call that the model makes.
    """

    shown: list[JsonValue] | None = None
    format: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    constraint: Constraint | None = None
    is_forced: bool = False


def read_tools(given: ToolFields, parser: str) -> ToolUse:
    """parser: the server's `--tool-call-parser`, "" for none. Raises: RequestError."""
    tools = _read_list(given.tools)
    choice = given.tool_choice
    if isinstance(choice, dict):
        return _forced(given, tools, [_read_named(choice, tools)], count_max=1)
    if choice not in (None, "none", "auto", "required"):
        allowed = "'none', 'auto', 'required', or one function by name"
        raise refusal("tool_choice", choice, allowed)
    if choice == "required":
        if not tools:
            allowed = "'none' or 'auto', since there are no tools"
            raise refusal("tool_choice", choice, allowed)
        return _forced(given, tools, tools, count_max=None if given.parallel_tool_calls else 1)
    if not tools or choice == "none":
        return ToolUse()
    tool_format = ToolFormat(parser) if parser else None
    is_held = tool_format is ToolFormat.HERMES and any(tool.strict for tool in tools)
    return ToolUse(
        shown=[*given.tools],
        format=tool_format,
        names=frozenset(tool.name for tool in tools),
        constraint=Constraint("tools", lark_grammar(_tagged(tools), "tools")) if is_held else None,
    )


def _read_list(items: list[Json]) -> list[Function]:
    tools: dict[str, Function] = {}
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise refusal("tools", items, "a list of objects")
        where = f"tools[{index}]"
        tool = read(
            Function, read(Tool, {"function": {}, **item}, where).function, f"{where}.function"
        )
        if tool.name in tools:
            raise RequestError(f"{where}: a second {tool.name!r}", field="tools")
        tools[tool.name] = tool
    return list(tools.values())


def _read_named(choice: JsonObject, tools: list[Function]) -> Function:
    where = "tool_choice.function"
    chosen = read(NamedTool, {"function": {}, **choice}, "tool_choice")
    name = read(NamedFunction, chosen.function, where).name
    for tool in tools:
        if tool.name == name:
            return tool
    raise refusal(f"{where}.name", name, f"one of {sorted(t.name for t in tools)}")


def _forced(
    given: ToolFields, tools: list[Function], allowed: list[Function], *, count_max: int | None
) -> ToolUse:
    name = "tool_choice"
    schema = calls_schema([(tool.name, tool.parameters) for tool in allowed], count_max)
    return ToolUse(
        shown=[*given.tools],
        format=ToolFormat.LIST,
        names=frozenset(tool.name for tool in tools),
        constraint=Constraint(name, schema_grammar(schema, name)),
        is_forced=True,
    )


def _tagged(tools: list[Function]) -> str:
    """Text with calls between tags in it, or text alone; in Lark."""
    calls = [f"call_{index}" for index in range(len(tools))]
    rules = [f"start: ({' | '.join(calls)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    rules.append(f"opened[lazy]: TEXT {json.dumps(OPENING)}")
    for call, tool in zip(calls, tools, strict=True):
        schema = tool.parameters if tool.strict else ANY_OBJECT
        styled = json.dumps({STYLE_KEY: {"whitespace_pattern": WHITESPACE}, **schema})
        begin = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        end = json.dumps(f"}}\n{CLOSING}")
        rules.append(f"{call}: opened {begin} %json {styled} {end}")
    return "\n".join(rules)


def calls_schema(tools: list[tuple[str, JsonObject]], count_max: int | None) -> JsonObject:
    """A list of calls. Every tool's parameters keep their own definitions."""
    calls: list[JsonValue] = []
    definitions: JsonObject = {}
    for name, parameters in tools:
        definitions[name] = _moved(parameters, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if count_max is not None:
        schema["maxItems"] = count_max
    return {**schema, "$defs": definitions}


def _moved(value: JsonValue, root: str) -> JsonValue:
    """A schema whose references follow it to `root` inside another one."""
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, root) for key, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
