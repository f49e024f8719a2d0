"""POST /v1/chat/completions: messages and tools go through the checkpoint's own template."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from common.errors import RequestError
from common.frontend.apis.openai_call import LogprobChoice, OpenAiCall, make_call, read_choice
from common.frontend.apis.openai_chat_shape import ChatShape
from common.frontend.apis.openai_run import answer
from common.frontend.bodies.constraints import only_one
from common.frontend.bodies.fields import (
    NOT_SUPPORTED,
    Fields,
    JsonObject,
    JsonValue,
    parse_object,
    shown,
)
from common.frontend.bodies.reader import request_name
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.sampling import SamplingNames
from common.frontend.bodies.tools import ToolUse, read_tools
from common.frontend.bodies.validation import encode_prompt
from common.frontend.context import FrontendContext
from common.frontend.requests.generation import request_limits
from common.frontend.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
NAME_PREFIX = "chatcmpl-"
CHAT_TOP_LOGPROBS_MAX = 20  # OpenAI's
NAMES = SamplingNames(("max_completion_tokens", "max_tokens"), "min_tokens", ("seed",))
UNSUPPORTED_KEYS = (
    "chat_template",
    "documents",
    "echo",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "mm_processor_kwargs",
)


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.post(PATH)
    async def chat(request: Request) -> Response:
        limits = request_limits(context, request.url.hostname)
        name = request_name(request, NAME_PREFIX)
        parser = context.config.tool_call_parser
        call, tools = await context.bodies.read(
            request, lambda body: parse_chat(body, context.tokenizer, limits, name, parser)
        )
        return await answer(request, context, call, ChatShape(context.tokenizer, tools))

    return router


def parse_chat(
    body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str, tool_call_parser: str
) -> tuple[OpenAiCall, ToolUse]:
    """Raises: RequestError; also if the template refuses the messages."""
    fields = Fields(body)
    fields.refuse(UNSUPPORTED_KEYS, NOT_SUPPORTED)
    if fields.get("modalities") not in (None, [], ["text"]):
        raise fields.error("modalities", '["text"]')
    choice = read_choice(fields, limits, NAMES, _read_logprobs(fields), max_new_tokens_default=None)
    if choice.max_new_tokens == 0:
        raise RequestError(f"{choice.max_name}=0: must be at least 1", field=choice.max_name)
    tools = read_tools(fields, tool_call_parser)
    wanted = [one for one in (choice.constraint, tools.constraint) if one is not None]
    # A format for the answer leaves no room for calls that nobody has to make.
    constraint = only_one(wanted) if tools.is_forced else next(iter(wanted), None)
    choice = replace(choice, constraint=constraint)
    text = render(fields, tokenizer, tools.shown)
    prompt = encode_prompt(text, "messages", tokenizer, limits, has_special=False)
    return make_call(fields, [prompt], choice, limits, name), tools


def _read_logprobs(fields: Fields) -> LogprobChoice:
    top_count = fields.integer("top_logprobs", 0, 0, CHAT_TOP_LOGPROBS_MAX)
    if fields.boolean("logprobs", False):
        return LogprobChoice(top_count=top_count)
    if top_count:
        raise fields.error("top_logprobs", "absent, since logprobs is not true")
    return LogprobChoice()


def render(fields: Fields, tokenizer: Tokenizer, tools: list[JsonValue] | None) -> str:
    """The prompt's text. Raises: RequestError."""
    continues = fields.boolean("continue_final_message", False)
    begins = fields.boolean("add_generation_prompt", not continues)
    if continues and begins:
        raise fields.error("add_generation_prompt", "false, since continue_final_message is true")
    kwargs = Fields.of(fields.get("chat_template_kwargs"), "chat_template_kwargs").values
    effort = fields.text("reasoning_effort", "")
    return tokenizer.render_chat(
        read_messages(fields),
        tools=tools,
        add_generation_prompt=begins,
        continue_final_message=continues,
        template_kwargs={"reasoning_effort": effort, **kwargs} if effort else kwargs,
    )


def read_messages(fields: Fields) -> list[JsonObject]:
    """Messages as templates take them. Raises: RequestError naming the first that is none."""
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fields.error("messages", "a list of messages, not empty")
    messages: list[JsonObject] = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(
                f"messages[{index}]={shown(item)}: must be an object", field="messages"
            )
        message = Fields(item, f"messages[{index}]")
        if not message.text("role", ""):
            raise message.error("role", "a string, such as 'user'")
        _check_content(message)
        messages.append({**item, **_with_parsed_arguments(message)})
    return messages


def _check_content(message: Fields) -> None:
    """Raises: RequestError unless content is text, parts of text, or absent beside tool calls."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.has("tool_calls")):
        return
    if not isinstance(content, list):
        raise message.error("content", "a string or a list of text parts")
    for index, part in enumerate(content):
        fields = Fields.of(part, f"{message.name('content')}[{index}]")
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            raise RequestError(
                f"{message.name('content')}[{index}]={shown(part)}: must be "
                '{"type": "text", "text": "..."}; this server takes text only',
                field=message.name("content"),
            )


def _with_parsed_arguments(message: Fields) -> JsonObject:
    """Tool calls with their arguments as an object: clients send a string, templates walk it."""
    calls = message.get("tool_calls")
    if calls is None:
        return {}
    if not isinstance(calls, list):
        raise message.error("tool_calls", "a list")
    parsed: list[JsonValue] = []
    for index, call in enumerate(calls):
        where = f"{message.name('tool_calls')}[{index}]"
        fields = Fields.of(call, where)
        function = Fields.of(fields.get("function"), f"{where}.function")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            try:
                arguments = dict(parse_object(arguments.encode()))
            except RequestError as exc:
                raise function.error("arguments", "a JSON object") from exc
        parsed.append({**fields.values, "function": {**function.values, "arguments": arguments}})
    return {"tool_calls": parsed}
