"""POST /v1/chat/completions: messages go through the checkpoint's own template.

Tools are shown to the template; what the model says about them comes back as text.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.errors import RequestError
from common.frontend.bodies import read_call, request_name
from common.frontend.context import FrontendContext
from common.frontend.fields import Fields, JsonObject, JsonValue, parse_object, shown
from common.frontend.generation import Continuation, request_limits
from common.frontend.openai_call import LogprobChoice, OpenAiCall, make_call, read_choice
from common.frontend.openai_run import Growth, answer, finish_fields
from common.frontend.sample import Limits
from common.frontend.sampling import NOT_SUPPORTED, SamplingNames
from common.frontend.tokenizer import Tokenizer
from common.frontend.validation import check_encoded
from common.request import TokenLogprobs

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
        limits = request_limits(context)
        name = request_name(request, NAME_PREFIX)
        call = await read_call(
            request, lambda body: parse_chat(body, context.tokenizer, limits, name)
        )
        return await answer(request, context, call, ChatShape(context.tokenizer))

    return router


def parse_chat(body: JsonObject, tokenizer: Tokenizer, limits: Limits, name: str) -> OpenAiCall:
    """Raises: RequestError; also if the template refuses the messages."""
    fields = Fields(body)
    fields.refuse(UNSUPPORTED_KEYS, NOT_SUPPORTED)
    if fields.get("modalities") not in (None, [], ["text"]):
        raise fields.error("modalities", '["text"]')
    choice = read_choice(fields, limits, NAMES, _read_logprobs(fields), max_new_tokens_default=None)
    if choice.max_new_tokens == 0:
        raise RequestError(f"{choice.max_name}=0: must be at least 1", field=choice.max_name)
    text = _render(fields, tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = check_encoded(text, token_ids, "messages", limits)
    return make_call(fields, [prompt], choice, limits, name)


def _read_logprobs(fields: Fields) -> LogprobChoice:
    top_count = fields.integer("top_logprobs", 0, 0, CHAT_TOP_LOGPROBS_MAX)
    if fields.boolean("logprobs", False):
        return LogprobChoice(top_count=top_count)
    if top_count:
        raise fields.error("top_logprobs", "absent, since logprobs is not true")
    return LogprobChoice()


def _render(fields: Fields, tokenizer: Tokenizer) -> str:
    """The prompt's text."""
    continues = fields.boolean("continue_final_message", False)
    begins = fields.boolean("add_generation_prompt", not continues)
    if continues and begins:
        raise fields.error("add_generation_prompt", "false, since continue_final_message is true")
    kwargs = Fields.of(fields.get("chat_template_kwargs"), "chat_template_kwargs").values
    effort = fields.text("reasoning_effort", "")
    return tokenizer.render_chat(
        read_messages(fields),
        tools=_read_tools(fields),
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


def _read_tools(fields: Fields) -> list[JsonValue] | None:
    """What the template is shown; nothing if the client wants no tool to be called."""
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.error("tool_choice", "'auto' or 'none'; calls are not enforced here")
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("tools", "a list of objects")
    return None if choice == "none" or not tools else tools


class ChatShape:
    """chat.completion objects, and chunks whose first one tells only the role."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, one: Continuation) -> dict[str, object]:
        return {
            "index": one.sample.index,
            "message": {"role": "assistant", "content": one.text},
            "logprobs": self._logprobs(one, 0, one.settled_count()),
            **finish_fields(one),
        }

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        running: dict[str, object] = {"finish_reason": None, "matched_stop": None}
        index = one.sample.index
        told: list[dict[str, object]] = []
        if growth.is_first:
            delta = {"role": "assistant", "content": ""}
            told.append({"index": index, "delta": delta, "logprobs": None, **running})
        logprobs = self._logprobs(one, growth.start, growth.stop)
        if growth.text or (logprobs is not None and growth.stop > growth.start):
            delta = {"content": growth.text}
            told.append({"index": index, "delta": delta, "logprobs": logprobs, **running})
        if one.is_ended:
            told.append({"index": index, "delta": {}, "logprobs": None, **finish_fields(one)})
        return told

    def _logprobs(self, one: Continuation, start: int, stop: int) -> dict[str, object] | None:
        if not one.sample.sampling.return_logprob:
            return None
        return {"content": [self._entry(entry) for entry in one.logprobs[start:stop]]}

    def _entry(self, entry: TokenLogprobs) -> dict[str, object]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        """bytes: the token's own, exact also where its text is a part of a character."""
        return {
            "token": self._tokenizer.token_text(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
            "logprob": logprob,
        }
