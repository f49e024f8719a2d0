"""Bodies of /v1/messages, Anthropic's Messages API, as bodies of a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.errors import RequestError
from common.frontend.apis.as_chat import in_own_names, own_names, parse_as_chat
from common.frontend.apis.messages_input import MESSAGES, TEXT_BLOCKS, read_messages
from common.frontend.apis.openai_call import OPENAI, OpenAiCall
from common.frontend.apis.openai_chat import ReasoningFields
from common.frontend.apis.token_api import tokenize_body
from common.frontend.bodies.body import (
    NOT_SUPPORTED,
    Body,
    Count,
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
from common.frontend.bodies.fields import JsonObject, JsonValue, shown
from common.frontend.bodies.prefixes import SaltFields
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.sampling import STOP_COUNT_MAX, Stop
from common.frontend.bodies.tools import NAME, TOOL_COUNT_MAX
from common.frontend.text.parsing.parsing import Parsers, Parsing
from common.frontend.text.tokenizer import Tokenizer

CLEAR_THINKING = "clear_thinking_20251015"

# ---- fields --------------------------------------------------------------------------------------


class CustomTool(Body, frozen=True, kw_only=True):
    type: Annotated[
        Literal["custom"], Meta(description='"custom"; this server has no tools of its own')
    ] = "custom"
    name: Annotated[str, NAME]
    description: str = ""
    input_schema: Object
    strict: bool = False
    defer_loading: Refused = None
    input_examples: Refused = None


class ToolChoice(Body, frozen=True, kw_only=True):
    """name is given with tool, and only then."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, NAME] | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body, frozen=True, kw_only=True):
    """enabled and disabled are told to the template as enable_thinking and thinking. Only
    max_tokens bounds what is thought: budget_tokens does not."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: Object


class OutputConfig(Body, frozen=True):
    effort: str = ""
    format: Annotated[Object, nested(OutputFormat)] = {}


class Edits(Body, frozen=True):
    """Only edits that leave everything as it is."""

    edits: list[Object] = []


TOOLS = Meta(max_length=TOOL_COUNT_MAX, extra_json_schema={"items": schema_of(CustomTool)})


class PromptFields(Body, frozen=True, kw_only=True):
    """What the prompt is made of."""

    messages: Annotated[list[Json], MESSAGES]
    system: Annotated[
        Json, Meta(description="a string, or a list of texts", extra_json_schema=TEXT_BLOCKS)
    ] = None
    tools: Annotated[list[Json], TOOLS] = []
    tool_choice: Annotated[Object, nested(ToolChoice)] = {}
    thinking: Annotated[Object, nested(Thinking)] = {}
    output_config: Annotated[Object, nested(OutputConfig)] = {}
    context_management: Annotated[Object, nested(Edits)] = {}
    chat_template_kwargs: Object = {}


class MessagesFields(PromptFields, frozen=True, kw_only=True):
    max_tokens: Positive
    stop_sequences: Annotated[list[Stop], Meta(max_length=STOP_COUNT_MAX)] = []
    metadata: Object = {}
    service_tier: Literal["auto", "standard_only"] = "auto"
    speed: Literal["standard"] = "standard"


class OneSample(Body, frozen=True):
    n: Literal[1] = 1


class ModelField(Body, frozen=True):
    model: str = ""


# The first row is Anthropic's. The others: what another field asks for here, or no reply tells.
UNSUPPORTED = refused(
    "container", "mcp_servers", "output_format",
    "stop", "max_completion_tokens", "response_format", "reasoning_effort", "stream_options",
    "continue_final_message", "add_generation_prompt", "parallel_tool_calls",
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids",
    "return_tokens_as_token_ids", "echo", "return_token_ids",
)  # fmt: skip
MESSAGES_BODY = schema_of(
    *OPENAI,
    UNSUPPORTED,
    ReasoningFields,
    MessagesFields,
    OneSample,
    spread=(Meeting, SaltFields),
)
COUNT_BODY = schema_of(ModelField, PromptFields)
OWN_NAMES = own_names(
    (r"response_format\.json_schema", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    (r"tools(\[\d+\])\.function\.parameters", r"tools\1.input_schema"),
    (r"tools(\[\d+\])\.function", r"tools\1"),
    (r"tool_choice\.function", "tool_choice"),
    ("stop", "stop_sequences"),
)

# ---- readers -------------------------------------------------------------------------------------


def parse_messages(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str, parsers: Parsers
) -> tuple[OpenAiCall, Parsing, bool]:
    """The call, how its output is read, and whether what is thought is told.

    Raises: RequestError.
    """
    read(UNSUPPORTED, body)
    read(OneSample, body)
    given = read(MessagesFields, body)
    chat = {key: value for key, value in body.items() if key not in fields_of(MessagesFields)}
    chat |= _prompt(given) | {"max_tokens": given.max_tokens, "stop": [*given.stop_sequences]}
    chat |= _output(given)
    call, parsing = parse_as_chat(chat, OWN_NAMES, tokenizer, limits, name, parsers)
    return call, parsing, given.thinking.get("display") != "omitted"


def count_tokens(body: JsonObject, tokenizer: Tokenizer, limits: Limits) -> dict[str, object]:
    """Of the prompt that these fields make. Raises: RequestError."""
    given = read(PromptFields, body)
    _output(given)
    chat = {"model": read(ModelField, body).model, **_prompt(given)}
    try:
        return {"input_tokens": tokenize_body(chat, tokenizer, limits)["count"]}
    except RequestError as error:
        raise in_own_names(error, OWN_NAMES) from error


def _prompt(given: PromptFields) -> JsonObject:
    messages, is_open = read_messages(given.system, given.messages)
    chat: JsonObject = {"messages": [*messages], "continue_final_message": is_open, **_tools(given)}
    _check_edits(given.context_management)
    if effort := read(OutputConfig, given.output_config, "output_config").effort:
        chat["reasoning_effort"] = effort
    kwargs = given.chat_template_kwargs
    if given.thinking:
        thinking = read(Thinking, given.thinking, "thinking").type
        if thinking != "adaptive":
            is_on = thinking == "enabled"  # one name or the other, as the template has it
            kwargs = {"enable_thinking": is_on, "thinking": is_on, **kwargs}
    return {**chat, "chat_template_kwargs": kwargs}


def _output(given: PromptFields) -> JsonObject:
    """The form that the output must have."""
    asked = read(OutputConfig, given.output_config, "output_config").format
    if not asked:
        return {}
    schema = read(OutputFormat, asked, "output_config.format").schema
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _check_edits(asked: JsonObject) -> None:
    name = "context_management.edits"
    for edit in read(Edits, asked, "context_management").edits:
        if edit.get("type") != CLEAR_THINKING or edit.get("keep") != "all":
            text = f"{name}={shown(edit)}: {NOT_SUPPORTED}, which changes no conversation"
            raise RequestError(text, field=name)


def _tools(given: PromptFields) -> JsonObject:
    tools: list[JsonValue] = []
    for index, item in enumerate(given.tools):
        tool = read(CustomTool, item, f"tools[{index}]")
        function: JsonObject = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict:
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    chat: JsonObject = {"tools": tools}
    if not given.tool_choice:
        return chat
    choice = read(ToolChoice, given.tool_choice, "tool_choice")
    if (choice.name is not None) != (choice.type == "tool"):
        allowed = "given" if choice.name is None else 'absent, since type is not "tool"'
        raise refusal("tool_choice.name", choice.name, allowed)
    chosen: dict[str, JsonValue] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.name}},
    }
    chat["tool_choice"] = chosen[choice.type]
    chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat
