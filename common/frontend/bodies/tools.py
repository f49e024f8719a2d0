"""The tools of a chat: what the template is shown, and what the output is made to be.

A call that is required is forced by a grammar: a JSON list of {"name", "parameters"}, each with the
parameters' own schema, whatever format the model was trained on. Calls that a model makes unasked
are looked for as `--tool-call-parser` says; where it says tags, a grammar holds what stands between
them to the schemas of strict tools. Knows nothing of templates or replies.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from common.errors import RequestError
from common.frontend.bodies.constraints import ANY_OBJECT, Constraint, lark_grammar, schema_grammar
from common.frontend.bodies.fields import NOT_SUPPORTED, Fields, JsonObject, JsonValue, shown
from common.frontend.text.tool_calls import CLOSING, OPENING, ToolFormat
from common.grammar import STYLE_KEY, WHITESPACE

NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's, and the dot that others allow
TOOL_COUNT_MAX = 128  # OpenAI's
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: what the template gets. format: how calls are told in the output, None: not at all.

    names: of the tools that may be called. constraint: what forces a call if `is_forced`, else only
        how one is written, should there be one.
    """

    shown: list[JsonValue] | None = None
    format: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    constraint: Constraint | None = None
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    parameters: JsonObject
    is_strict: bool


def read_tools(fields: Fields, parser: str) -> ToolUse:
    """parser: the server's `--tool-call-parser`, "" for none. Raises: RequestError."""
    tools = _read_list(fields)
    names = frozenset(tool.name for tool in tools)
    is_parallel = fields.boolean("parallel_tool_calls", True)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        chosen = _read_named(Fields(choice, "tool_choice"), tools)
        return _forced(fields, names, [chosen], "tool_choice", count_max=1)
    if choice not in (None, "none", "auto", "required"):
        raise fields.error("tool_choice", "'none', 'auto', 'required', or one function by name")
    if choice == "required":
        if not tools:
            raise fields.error("tool_choice", "'none' or 'auto', since there are no tools")
        return _forced(fields, names, tools, "tool_choice", count_max=None if is_parallel else 1)
    if not tools or choice == "none":
        return ToolUse()
    tool_format = ToolFormat(parser) if parser else None
    is_held = tool_format is ToolFormat.HERMES and any(tool.is_strict for tool in tools)
    return ToolUse(
        shown=_shown(fields),
        format=tool_format,
        names=names,
        constraint=Constraint("tools", lark_grammar(_tagged(tools), "tools")) if is_held else None,
    )


def _shown(fields: Fields) -> list[JsonValue] | None:
    tools = fields.get("tools")
    return tools if isinstance(tools, list) else None


def _read_list(fields: Fields) -> list[_Tool]:
    value = fields.get("tools")
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > TOOL_COUNT_MAX:
        raise fields.error("tools", f"a list of at most {TOOL_COUNT_MAX} tools")
    tools: dict[str, _Tool] = {}
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise fields.error("tools", "a list of objects")
        tool = _read_tool(item, f"tools[{index}]")
        if tool.name in tools:
            raise RequestError(f"tools[{index}]: a second {tool.name!r}", field="tools")
        tools[tool.name] = tool
    return list(tools.values())


def _read_tool(item: JsonObject, where: str) -> _Tool:
    fields = Fields(item, where)
    if fields.text("type", "function") != "function":
        raise RequestError(
            f"{where}.type={shown(fields.get('type'))}: {NOT_SUPPORTED}; it must be 'function'",
            field=f"{where}.type",
        )
    function = Fields.of(fields.get("function"), f"{where}.function")
    name = function.text("name", "")
    if not NAME_PATTERN.fullmatch(name):
        raise function.error("name", "1..64 letters, digits, '_', '-' or '.'")
    is_strict = function.boolean("strict", False)
    parameters = function.get("parameters")
    if parameters is None:
        return _Tool(name, NO_PARAMETERS, is_strict)
    if not isinstance(parameters, dict):
        raise function.error("parameters", "a JSON schema: an object")
    return _Tool(name, parameters, is_strict)


def _read_named(choice: Fields, tools: list[_Tool]) -> _Tool:
    if choice.text("type", "") != "function":
        raise choice.error("type", "'function'")
    name = Fields.of(choice.get("function"), "tool_choice.function").text("name", "")
    for tool in tools:
        if tool.name == name:
            return tool
    raise RequestError(
        f"tool_choice.function.name={shown(name)}: must be one of {sorted(t.name for t in tools)}",
        field="tool_choice.function.name",
    )


def _forced(
    fields: Fields, names: frozenset[str], allowed: list[_Tool], name: str, *, count_max: int | None
) -> ToolUse:
    schema = calls_schema([(tool.name, tool.parameters) for tool in allowed], count_max)
    return ToolUse(
        shown=_shown(fields),
        format=ToolFormat.LIST,
        names=names,
        constraint=Constraint(name, schema_grammar(schema, name)),
        is_forced=True,
    )


def _tagged(tools: list[_Tool]) -> str:
    """Text with calls between tags in it, or text alone; in Lark."""
    calls = [f"call_{index}" for index in range(len(tools))]
    rules = [f"start: ({' | '.join(calls)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    rules.append(f"opened[lazy]: TEXT {json.dumps(OPENING)}")
    for call, tool in zip(calls, tools, strict=True):
        schema = tool.parameters if tool.is_strict else ANY_OBJECT
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
