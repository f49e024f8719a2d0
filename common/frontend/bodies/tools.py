"""The tools of a chat: the template's view of them, and the form that they ask of the output.

A call that is required is forced by a grammar: a JSON list of {"name", "parameters"}, each with the
parameters' own schema, whatever format the model was trained on. Calls that a model makes unasked
are looked for as `--tool-call-parser` says; where a format's arguments are JSON, a grammar holds
them to the schemas of strict tools. Knows nothing of templates or replies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import Body, Json, Object, nested, read, refusal, schema_of
from common.frontend.bodies.constraints import ANY_OBJECT, Constraint, lark_grammar, schema_grammar
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.output_grammars import tagged_calls
from common.frontend.text.parsing.bodies import Tools
from common.frontend.text.parsing.form import CallFormat
from common.frontend.text.parsing.parsing import Parsers

TOOL_COUNT_MAX = 128  # OpenAI's
ALLOWED = "tool_choice.allowed_tools"
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


class AllowedTools(Body, frozen=True):
    """Some of the tools, of which any or one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Json], Meta(extra_json_schema={"items": schema_of(NamedTool)})]


class AllowedChoice(Body, frozen=True):
    type: Literal["allowed_tools"]
    allowed_tools: Annotated[Object, nested(AllowedTools)]


TOOL: JsonObject = {"items": schema_of(Tool)}
TOOL_CHOICE: JsonObject = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]}, schema_of(NamedTool), schema_of(AllowedChoice)
    ]
}  # fmt: skip


class ToolFields(Body, frozen=True):
    """Of bodies that are made a prompt of by a template."""

    tools: Annotated[list[Json], Meta(max_length=TOOL_COUNT_MAX, extra_json_schema=TOOL)] = []
    tool_choice: Annotated[Json, Meta(extra_json_schema=TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True


# ---- readers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: the tools for the template. form: how the output writes calls, None: not at all.

    tools: that may be called. constraint: forces a call if `is_forced`, else only the form of a
        call that the model makes.
    """

    shown: list[JsonValue] | None = None
    form: CallFormat | None = None
    tools: Tools = field(default_factory=dict)
    constraint: Constraint | None = None
    is_forced: bool = False


def read_tools(given: ToolFields, parsers: Parsers) -> ToolUse:
    """parsers: the server's. Raises: RequestError."""
    tools = _read_list(given.tools)
    choice = given.tool_choice
    count_max = None if given.parallel_tool_calls else 1
    shown = [*given.tools]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        asked = read(
            AllowedTools, read(AllowedChoice, choice, "tool_choice").allowed_tools, ALLOWED
        )
        tools = [_read_named(one, tools, f"{ALLOWED}.tools") for one in asked.tools]
        names = {tool.name for tool in tools}
        shown = [item for item in shown if _name_in(item) in names]
        choice = asked.mode
    elif isinstance(choice, dict):
        named = [_read_named(choice, tools, "tool_choice")]
        return _forced(shown, named, parsers, count_max=1)
    if choice not in (None, "none", "auto", "required"):
        allowed = "'none', 'auto', 'required', allowed_tools, or one function by name"
        raise refusal("tool_choice", choice, allowed)
    if choice == "required":
        if not tools:
            allowed = "'none' or 'auto', since there are no tools"
            raise refusal("tool_choice", choice, allowed)
        return _forced(shown, tools, parsers, count_max=count_max)
    if not tools or choice == "none":
        return ToolUse()
    return ToolUse(
        shown=shown,
        form=parsers.calls,
        tools={tool.name: tool.parameters for tool in tools},
        constraint=_strict(tools, parsers),
    )


def _strict(tools: list[Function], parsers: Parsers) -> Constraint | None:
    """What holds calls of strict tools to their schemas, where the model's format can be held."""
    form = parsers.calls
    if form is None or form.written is None or not any(tool.strict for tool in tools):
        return None
    held = [(tool.name, tool.parameters if tool.strict else ANY_OBJECT) for tool in tools]
    return Constraint("tools", lark_grammar(tagged_calls(held, form, parsers.tokens), "tools"))


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


def _read_named(choice: JsonValue, tools: list[Function], where: str) -> Function:
    if not isinstance(choice, dict):
        raise refusal(where, choice, "an object")
    chosen = read(NamedTool, {"function": {}, **choice}, where)
    name = read(NamedFunction, chosen.function, f"{where}.function").name
    for tool in tools:
        if tool.name == name:
            return tool
    raise refusal(f"{where}.function.name", name, f"one of {sorted(t.name for t in tools)}")


def _name_in(tool: Json) -> JsonValue:
    """The name of a tool that has been read before."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _forced(
    shown: list[JsonValue], allowed: list[Function], parsers: Parsers, *, count_max: int | None
) -> ToolUse:
    name = "tool_choice"
    tools = {tool.name: tool.parameters for tool in allowed}
    schema = calls_schema([*tools.items()], count_max)
    return ToolUse(
        shown=shown,
        form=parsers.listed,
        tools=tools,
        constraint=Constraint(name, schema_grammar(schema, name)),
        is_forced=True,
    )


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
