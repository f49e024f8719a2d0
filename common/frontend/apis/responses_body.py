"""Bodies of /v1/responses, OpenAI's Responses API, as bodies of a chat.

Nothing is stored: `store: true`, which clients send unasked, is answered as vLLM does without a
store, and `store: false` stands in the reply; what needs a store is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import RequestError
from common.frontend.apis.as_chat import own_names, parse_as_chat
from common.frontend.apis.openai_call import OPENAI, OpenAiCall
from common.frontend.apis.openai_chat import CHAT_TOP_LOGPROBS_MAX, ReasoningFields
from common.frontend.apis.responses_input import INPUT, INPUT_SCHEMA, read_input
from common.frontend.bodies.body import (
    NOT_SUPPORTED,
    Body,
    Json,
    Object,
    Positive,
    Refused,
    fields_of,
    nested,
    read,
    refusal,
    refused,
    schema_of,
)
from common.frontend.bodies.bootstrap_address import Meeting
from common.frontend.bodies.fields import JsonObject, JsonValue, is_given, shown
from common.frontend.bodies.prefixes import SaltFields
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.tools import NAME, NO_PARAMETERS, TOOL_COUNT_MAX
from common.frontend.text.parsing.parsing import Parsers, Parsing
from common.frontend.text.tokenizer import Tokenizer

METADATA_COUNT_MAX = 16  # OpenAI's
LOGPROBS = "message.output_text.logprobs"

# ---- fields --------------------------------------------------------------------------------------


class FunctionTool(Body, frozen=True, kw_only=True):
    type: Annotated[
        Literal["function"], Meta(description='"function"; this server has no tools of its own')
    ]
    name: Annotated[str, NAME]
    description: str = ""
    parameters: Object = msgspec.field(default_factory=NO_PARAMETERS.copy)
    strict: bool = False
    defer_loading: Refused = None


class ChosenFunction(Body, frozen=True):
    type: Literal["function"]
    name: Annotated[str, NAME]


class AllowedTools(Body, frozen=True):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Json],
        Meta(max_length=TOOL_COUNT_MAX, extra_json_schema={"items": schema_of(ChosenFunction)}),
    ]


class TextFormat(Body, frozen=True):
    """A schema is given with json_schema, and only then."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str = ""
    schema: Object | None = None
    strict: bool = False  # a schema is followed to the letter either way


class TextFields(Body, frozen=True):
    format: Annotated[Object, nested(TextFormat)] = {}
    verbosity: Literal["medium"] = "medium"


class AskedReasoning(Body, frozen=True):
    """The reasoning is told as it is; nothing sums it up."""

    effort: str = ""
    mode: Literal["standard"] = "standard"
    context: Literal["auto"] = "auto"  # the template says what it shows of earlier turns
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Body, frozen=True):
    include_obfuscation: bool = False  # there is none either way


TOOLS = Meta(max_length=TOOL_COUNT_MAX, extra_json_schema={"items": schema_of(FunctionTool)})
TOOL_CHOICE: JsonObject = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        schema_of(ChosenFunction),
        schema_of(AllowedTools),
    ]
}
INCLUDABLE = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What is told of items that a reply has. There are none but texts, reasoning and calls here."""


class ResponsesFields(Body, frozen=True, kw_only=True):
    input: Annotated[Json, Meta(description=INPUT, extra_json_schema=INPUT_SCHEMA)]
    instructions: str = ""
    max_output_tokens: Positive | None = None
    tools: Annotated[list[Json], TOOLS] = []
    tool_choice: Annotated[Json, Meta(extra_json_schema=TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    text: Annotated[Object, nested(TextFields)] = {}
    reasoning: Annotated[Object, nested(AskedReasoning)] = {}
    include: list[INCLUDABLE] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=CHAT_TOP_LOGPROBS_MAX)] = 0
    stream_options: Annotated[Object, nested(ResponsesStreamOptions)] = {}
    store: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    max_tool_calls: Positive | None = None
    metadata: Annotated[Object, Meta(max_length=METADATA_COUNT_MAX)] = {}
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class OptionFields(Body, frozen=True):
    """What this API has of a chat's fields as they are, beside those of `OPENAI`."""

    n: Literal[1] = 1
    chat_template_kwargs: Object = {}


# What a store would be for, what another field asks for here, and what no reply here tells.
STORED = ("previous_response_id", "conversation", "background")
UNSUPPORTED = refused(
    *STORED, "prompt", "context_management", "moderation", "previous_input_messages",
    "enable_response_messages", "response_format", "reasoning_effort", "logprobs", "echo",
    "continue_final_message", "add_generation_prompt", "return_token_ids", "prompt_logprobs",
    "logprob_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip
RESPONSES = schema_of(
    *OPENAI,
    UNSUPPORTED,
    ReasoningFields,
    ResponsesFields,
    OptionFields,
    spread=(Meeting, SaltFields),
)
OWN_NAMES = own_names(
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    (r"tools(\[\d+\])\.function", r"tools\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"tool_choice\.allowed_tools", "tool_choice"),
)

# ---- readers -------------------------------------------------------------------------------------


def parse_responses(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str, parsers: Parsers
) -> tuple[OpenAiCall, Parsing, ResponsesFields]:
    """The call, how its output is read, and what of the body stands in the reply again.

    Raises: RequestError.
    """
    for key in STORED:
        if is_given(body.get(key)):
            raise RequestError(
                f"{key}={shown(body[key])}: {NOT_SUPPORTED}, which stores no responses; send the "
                "whole conversation as input",
                field=key,
            )
    read(UNSUPPORTED, body)
    read(OptionFields, body)
    given = read(ResponsesFields, body)
    chat = {key: value for key, value in body.items() if key not in fields_of(ResponsesFields)}
    messages, is_open = read_input(given.input, given.instructions)
    chat |= {"messages": [*messages], "continue_final_message": is_open}
    chat |= _tools(given) | _format(given) | _options(given)
    call, parsing = parse_as_chat(chat, OWN_NAMES, tokenizer, limits, name, parsers)
    return call, parsing, given


def _options(given: ResponsesFields) -> JsonObject:
    read(ResponsesStreamOptions, given.stream_options, "stream_options")
    reasoning = read(AskedReasoning, given.reasoning, "reasoning")
    options: JsonObject = {}
    if given.max_output_tokens is not None:
        options["max_completion_tokens"] = given.max_output_tokens
    if LOGPROBS in given.include or given.top_logprobs:
        options |= {"logprobs": True, "top_logprobs": given.top_logprobs}
    if reasoning.effort:
        options["reasoning_effort"] = reasoning.effort
    return options


def _format(given: ResponsesFields) -> JsonObject:
    asked = read(TextFields, given.text, "text").format
    if not asked:
        return {}
    form = read(TextFormat, asked, "text.format")
    if (form.schema is not None) != (form.type == "json_schema"):
        allowed = "an object" if form.schema is None else 'absent, since type is not "json_schema"'
        raise refusal("text.format.schema", form.schema, allowed)
    described: JsonObject = {"type": form.type}
    if form.schema is not None:
        described["json_schema"] = {"name": form.name, "schema": form.schema}
    return {"response_format": described}


def _tools(given: ResponsesFields) -> JsonObject:
    tools: list[JsonValue] = []
    for index, item in enumerate(given.tools):
        tool = read(FunctionTool, item, f"tools[{index}]")
        function: JsonObject = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.parameters
        if tool.strict:
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    return {
        "tools": tools,
        "tool_choice": _choice(given.tool_choice),
        "parallel_tool_calls": given.parallel_tool_calls,
    }


def _choice(choice: JsonValue) -> JsonValue:
    """The same of a chat, where a function is an object in an object."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _named(choice, "tool_choice")
    allowed = read(AllowedTools, choice, "tool_choice")
    names: list[JsonValue] = [
        _named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed.tools)
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": names}}


def _named(choice: JsonValue, where: str) -> JsonObject:
    name = read(ChosenFunction, choice, where).name
    return {"type": "function", "function": {"name": name}}
