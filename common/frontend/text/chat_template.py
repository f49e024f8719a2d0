"""A checkpoint's chat template: messages in, prompt text out.

Runs the template as transformers does: a Jinja sandbox that can not change what it is given, with
the filters and tags that published templates use. The template is the checkpoint's and checked at
start; what goes wrong with messages is the client's 400. Knows nothing of tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue

# Marks where the last message ends in the rendered text; no template rewrites such a word.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Several times the largest body that is read; a template that loops over messages inside a loop
# over messages grows with their square.
RENDERED_LENGTH_MAX = 1 << 27
# What a template can run into with messages of a shape that it was not written for.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The templates of one checkpoint, "default" and perhaps "tool_use".

    special_tokens: what templates may refer to, such as bos_token. wall: seconds since 1970.
    sources: the templates by name.
    Raises: ConfigError if a template is not valid Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        wall: Callable[[], float],
    ) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._wall = wall
        environment = self._environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._takes_parts: dict[str, bool] = {}
        self._asks_for_none: dict[str, bool] = {}
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
                parsed = environment.parse(source)
                self._takes_parts[name] = iterates_content(parsed)
                self._asks_for_none[name] = asks_for_no_content(parsed)
            except jinja2.TemplateError as exc:
                raise ConfigError(f"chat template {name!r} is not valid Jinja: {exc}") from exc

    def render(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonValue] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, JsonValue],
    ) -> str:
        """Raises: RequestError if the template refuses the messages or fails on them."""
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise RequestError(
                f"this checkpoint has no default chat template, only {sorted(self._compiled)}"
            )
        absent = None if self._asks_for_none[name] else ""
        shown = [_without_nulls(message, absent) for message in messages]
        if not self._takes_parts[name]:
            shown = [_with_text_content(message) for message in shown]
        if continue_final_message:
            has_text = messages[-1].get("content") is not None
            shown[-1] = _with_tag(shown[-1] if has_text else messages[-1])
        values = {
            **self._special_tokens,
            **template_kwargs,
            "messages": shown,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = _join_bounded(self._compiled[name].generate(values))
        except TEMPLATE_ERRORS as exc:
            raise RequestError(
                f"the chat template refuses the messages: {exc}", field="messages"
            ) from exc
        return _cut_at_tag(rendered) if continue_final_message else rendered

    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        return environment

    def _strftime_now(self, pattern: str) -> str:
        return datetime.fromtimestamp(self._wall()).strftime(pattern)


def _join_bounded(parts: Iterable[str]) -> str:
    """The text of a template as it comes out. Raises: ValueError if it does not end in time."""
    texts: list[str] = []
    length = 0
    for text in parts:
        texts.append(text)
        length += len(text)
        if length > RENDERED_LENGTH_MAX:
            raise ValueError(f"the text has more than {RENDERED_LENGTH_MAX} characters")
    return "".join(texts)


def iterates_content(template: nodes.Template) -> bool:
    """Whether the template walks through the parts of a message's content by itself."""
    names = _names_of_content(template)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def asks_for_no_content(template: nodes.Template) -> bool:
    """Whether the template looks by itself if a message's content is none."""
    names = _names_of_content(template)
    return any(
        test.name == "none" and _is_content(test.node, names)
        for test in template.find_all(nodes.Test)
    )


def _names_of_content(template: nodes.Template) -> frozenset[str]:
    return frozenset(
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    )


def _is_content(node: nodes.Node, names: frozenset[str] = frozenset()) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner, names)
        case _:
            return False


def _without_nulls(message: JsonObject, absent: str | None) -> JsonObject:
    """A message as templates expect it, which ask if a member is there, but not for its content.

    absent: the content of a message that has none.
    """
    shown: JsonObject = {"content": absent}
    return shown | {key: value for key, value in message.items() if value is not None}


def _with_text_content(message: JsonObject) -> JsonObject:
    """Content as one string, for a template that knows no parts; joined as SGLang joins them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return {**message, "content": " ".join(text for text in texts if isinstance(text, str))}


def _with_tag(message: JsonObject) -> JsonObject:
    """The message with the end of its text marked."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CONTINUE_TAG}
    if isinstance(content, list) and content:
        last = content[-1]
        if isinstance(last, dict) and isinstance(last.get("text"), str):
            return {
                **message,
                "content": [*content[:-1], {**last, "text": f"{last['text']}{CONTINUE_TAG}"}],
            }
    raise RequestError(
        "continue_final_message=true: the last message has no text to continue",
        field="continue_final_message",
    )


def _cut_at_tag(rendered: str) -> str:
    """What stands before the mark; a template that trims the message has trimmed the mark too."""
    place = rendered.rfind(CONTINUE_TAG.strip())
    if place < 0:
        raise RequestError(
            "continue_final_message=true: the chat template does not show the last message",
            field="continue_final_message",
        )
    if rendered.startswith(CONTINUE_TAG, place):
        return rendered[:place]
    return rendered[:place].rstrip()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)
