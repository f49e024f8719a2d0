"""Bodies of /v1/chat/completions: messages and tools go through the checkpoint's own template."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, structs

from common.errors import RequestError
from common.frontend.apis.openai_call import (
    OPENAI,
    OpenAiCall,
    make_call,
    read_choice,
    read_encoding,
)
from common.frontend.apis.openai_logprobs import ALL_TOKENS, read_told
from common.frontend.bodies.body import (
    Body,
    Json,
    Object,
    Positive,
    nested,
    or_null,
    path,
    read,
    refusal,
    refused,
    schema_of,
)
from common.frontend.bodies.bootstrap_address import Meeting
from common.frontend.bodies.constraints import only_one
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object, shown
from common.frontend.bodies.output_grammars import behind_reasoning
from common.frontend.bodies.prefixes import SaltFields
from common.frontend.bodies.prompts import Prompt, encode_prompt, read_computed_prompt
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.tools import ToolFields, ToolUse, read_tools
from common.frontend.text.parsing.parsing import Beginning, Parsers, Parsing, beginning
from common.frontend.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
NAME_PREFIX = "chatcmpl-"
CHAT_TOP_LOGPROBS_MAX = 20  # OpenAI's
CHAT_LIKELY = f"{ALL_TOKENS} for all tokens, or an integer in 0..{CHAT_TOP_LOGPROBS_MAX}"
PART: JsonObject = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


ARGUMENTS: JsonObject = {"type": ["object", "string", "null"]}


class CalledFunction(Body, frozen=True):
    arguments: Annotated[Json, Meta(extra_json_schema=ARGUMENTS)] = None


class Call(Body, frozen=True):
    function: Annotated[Object, nested(CalledFunction)] = {}


CALLS = Meta(description="a list of calls", extra_json_schema={"items": or_null(schema_of(Call))})
CONTENT: JsonObject = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}


class Message(Body, frozen=True):
    """Without tool_calls, content must be given."""

    role: Annotated[str, Meta(min_length=1, description="a string, such as 'user'")]
    content: Annotated[Json, Meta(extra_json_schema=CONTENT)] = None
    tool_calls: Annotated[list[Json], CALLS] | None = None


MESSAGES = Meta(
    min_length=1,
    description="a list of messages, not empty",
    extra_json_schema={"items": schema_of(Message)},
)


class TemplateFields(ToolFields, frozen=True, kw_only=True):
    """The fields that a template makes a prompt of."""

    messages: Annotated[list[Json], MESSAGES]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Object = {}
    reasoning_effort: str = ""


class ReasoningFields(Body, frozen=True):
    separate_reasoning: bool = True  # SGLang's: or it stays in the text
    stream_reasoning: bool = True  # SGLang's: or it is sent when it is complete
    include_reasoning: bool = True  # vLLM's: or it is not sent


class ChatFields(Body, frozen=True):
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    logprobs: bool = False
    echo: bool = False
    top_logprobs: Annotated[
        int, Meta(ge=ALL_TOKENS, le=CHAT_TOP_LOGPROBS_MAX, description=CHAT_LIKELY)
    ] = 0
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] = []


UNSUPPORTED = refused(
    "chat_template", "documents", "functions", "function_call", "audio", "prediction",
    "web_search_options", "mm_processor_kwargs",
)  # fmt: skip
CHAT = schema_of(
    *OPENAI, UNSUPPORTED, TemplateFields, ReasoningFields, ChatFields, spread=(Meeting, SaltFields)
)


def parse_chat(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str, parsers: Parsers
) -> tuple[OpenAiCall, Parsing]:
    """The call, and how its outputs are read.

    Raises: RequestError; also if the template refuses the messages.
    """
    key = "max_completion_tokens"
    if body.get(key) is not None:
        body = {**body, "max_tokens": None}  # the first one that is given counts
    read(UNSUPPORTED, body)
    given = read(ChatFields, body)
    if given.top_logprobs and not given.logprobs:
        allowed = "absent, since logprobs is not true"
        raise refusal("top_logprobs", given.top_logprobs, allowed)
    told = read_told(body, "top_logprobs", given.top_logprobs if given.logprobs else None, limits)
    choice = read_choice(
        body,
        limits,
        key if given.max_tokens is None else "max_tokens",
        given.max_completion_tokens or given.max_tokens,
        default=None,
        told=told,
    )
    template = read(TemplateFields, body)
    tools = read_tools(template, parsers)
    wanted = [one for one in (choice.constraint, tools.constraint) if one is not None]
    # A format for the answer leaves no room for calls that are not required.
    constraint = only_one(wanted) if tools.is_forced else next(iter(wanted), None)
    prompt, text = _read_prompt(body, template, tools, tokenizer, limits)
    begins = beginning(parsers.reasoning, text, _continued_text(template))
    is_whole = constraint is tools.constraint and tools.has_reasoning
    if parsers.reasoning and constraint and begins is not Beginning.BEHIND and not is_whole:
        constraint = behind_reasoning(
            constraint, parsers.reasoning, parsers.tokens, is_inside=begins is Beginning.INSIDE
        )
    parsing = _read_parsing(read(ReasoningFields, body), template, tools, parsers, begins)
    shown_ids = frozenset[int]() if parsing.is_verbatim else parsers.shown_ids
    choice = structs.replace(
        choice, constraint=constraint, text=structs.replace(choice.text, shown_ids=shown_ids)
    )
    call = make_call(body, [prompt], choice, limits, name, told)
    echo = _echo_of(template) if given.echo else ""
    return structs.replace(call, echo=echo), parsing


def _read_prompt(
    body: JsonObject, template: TemplateFields, tools: ToolUse, tokenizer: Tokenizer, limits: Limits
) -> tuple[Prompt, str]:
    """The prompt, and all of its text, special tokens included."""
    prompt = read_computed_prompt(body, limits)
    if prompt is not None:
        read_messages(template)  # checked all the same
        return prompt, tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    given = read(ChatFields, body)
    text = render(template, tokenizer, tools.shown)
    max_new_tokens = given.max_completion_tokens or given.max_tokens
    encoding = read_encoding(body, max_new_tokens, limits, has_special=False)
    return encode_prompt(text, "messages", tokenizer, limits, encoding), text


def _read_parsing(
    given: ReasoningFields,
    template: TemplateFields,
    tools: ToolUse,
    parsers: Parsers,
    begins: Beginning,
) -> Parsing:
    is_separate = given.separate_reasoning and begins is not Beginning.BEHIND
    return Parsing(
        reasoning=parsers.reasoning if is_separate else None,
        calls=tools.form,
        tools=tools.tools,
        is_inside=is_separate and begins is Beginning.INSIDE,
        call_count=_count_calls(template.messages),
        holds_reasoning=not given.stream_reasoning,
        drops_reasoning=not given.include_reasoning,
        is_single=not template.parallel_tool_calls,
    )


def _continued_text(given: TemplateFields) -> str | None:
    """What the output goes on from, if it goes on from a message."""
    last = given.messages[-1]
    if not given.continue_final_message or not isinstance(last, dict):
        return None
    content = last.get("content")
    return content if isinstance(content, str) else ""


def _count_calls(messages: list[Json]) -> int:
    calls = [item.get("tool_calls") for item in messages if isinstance(item, dict)]
    return sum(len(one) for one in calls if isinstance(one, list))


def _echo_of(given: TemplateFields) -> str:
    """The text of the last message if the answer is of the same role, as vLLM's `echo` has it. The
    messages have been checked."""
    last = given.messages[-1]
    assert isinstance(last, dict)
    content = last.get("content")
    begins = given.add_generation_prompt
    if begins is None:
        begins = not given.continue_final_message
    if begins and last["role"] != "assistant":
        return ""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def read_messages(given: TemplateFields) -> list[JsonObject]:
    """As templates take them. Raises: RequestError."""
    return [_read_message(item, f"messages[{i}]") for i, item in enumerate(given.messages)]


def render(given: TemplateFields, tokenizer: Tokenizer, tools: list[JsonValue] | None) -> str:
    """The prompt's text. Raises: RequestError."""
    continues, begins = given.continue_final_message, given.add_generation_prompt
    if continues and begins:
        allowed = "false, since continue_final_message is true"
        raise refusal("add_generation_prompt", True, allowed)
    return tokenizer.render_chat(
        read_messages(given),
        tools=tools,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        template_kwargs={**_effort_kwargs(given.reasoning_effort), **given.chat_template_kwargs},
    )


def _effort_kwargs(effort: str) -> JsonObject:
    """Templates ask for an effort, or whether to think, under either of two names."""
    if not effort:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}


def _read_message(item: JsonValue, where: str) -> JsonObject:
    """A message as templates take it: all of its members, with arguments of calls as objects.

    Raises: RequestError.
    """
    if not isinstance(item, dict):
        raise RequestError(f"{where}={shown(item)}: must be an object", field="messages")
    message = read(Message, item, where)
    _check_content(message, path(where, "content"))
    shown_message = {**item, **_reasoning_members(item)}
    if message.tool_calls is None:
        return shown_message
    if not message.tool_calls:  # as if there were none, which templates don't ask for
        return {key: value for key, value in shown_message.items() if key != "tool_calls"}
    place = path(where, "tool_calls")
    calls = [_read_call(call, f"{place}[{i}]") for i, call in enumerate(message.tool_calls)]
    return {**shown_message, "tool_calls": [*calls]}


def _reasoning_members(message: JsonObject) -> JsonObject:
    """What an earlier answer thought, under the names that templates know."""
    given = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(given, str):
        return {}
    members: JsonObject = {"reasoning_content": given, "reasoning": given}
    # A template refuses a message with calls that has both a text and thoughts of this name.
    if not (message.get("content") and message.get("tool_calls")):
        members["thinking"] = given
    return members


def _check_content(message: Message, name: str) -> None:
    """Raises: RequestError unless content is text, parts of text, or absent beside tool calls."""
    content = message.content
    if isinstance(content, str) or (content is None and message.tool_calls is not None):
        return
    if not isinstance(content, list):
        raise refusal(name, content, "a string or a list of text parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise refusal(f"{name}[{index}]", part, "an object")
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{name}[{index}]={shown(part)}: must be "
                '{"type": "text", "text": "..."}; this server takes text only',
                field=name,
            )


def _read_call(value: JsonValue, where: str) -> JsonObject:
    """Templates walk arguments, which clients send as a string."""
    call = {} if value is None else value
    function = read(Call, call, where).function
    assert isinstance(call, dict), "a call is read from an object"
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments.encode())
        except RequestError as exc:
            raise refusal(path(where, "function.arguments"), arguments, "a JSON object") from exc
    return {**call, "function": {**function, "arguments": arguments}}
