"""The three APIs of a load: their bodies, and the events of their streams.

Knows nothing of sockets or of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from bench.serve.conversation import (
    ChatConversation,
    Conversation,
    Decode,
    TokenConversation,
)
from bench.serve.sessions import PromptSource, Session
from bench.serve.settings import SESSIONS, Settings
from bench.serve.workload import Ask


@dataclass(frozen=True, slots=True)
class Heard:
    """The content of one event.

    output_count: tokens so far, None if the API does not report it. has_text: the event has
        visible text. prompt_count: tokens of the prompt, cached_count: those of them that the
        server had already, if reported. failure: why the request failed.
    output_ids: of new tokens, or with has_all_ids of all so far; text: new text. For sessions only.
    """

    output_count: int | None = None
    has_text: bool = False
    prompt_count: int | None = None
    cached_count: int | None = None
    failure: str = ""
    output_ids: list[int] = field(default_factory=list)
    has_all_ids: bool = False
    text: str = ""


class Dialect(Protocol):
    """One API. path: where it is posted."""

    path: str

    def body(self, ask: Ask) -> dict[str, object]: ...

    def converse(
        self, session: Session, source: PromptSource, first_index: int
    ) -> Conversation: ...

    def hear(self, event: bytes) -> Heard:
        """Raises: msgspec.DecodeError or UnicodeDecodeError if an event is not of this API."""


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _FinishReason(msgspec.Struct):
    type: str
    message: str = ""


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _FinishReason | None = None


class _SglangEvent(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Error | None = None


class _SglangAnswer(_SglangEvent):
    """With the ids, which are costly to read if all of them come with every event."""

    output_ids: list[int] = []


class SglangDialect:
    """POST /generate, which takes token ids and reports their count with every event."""

    path = "/generate"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        is_kept = settings.dataset_name == SESSIONS
        self._decoder = msgspec.json.Decoder(_SglangAnswer if is_kept else _SglangEvent)

    def body(self, ask: Ask) -> dict[str, object]:
        sampling = {
            "max_new_tokens": ask.output_count,
            "temperature": 0.0,
            "ignore_eos": self._settings.ignore_eos,
        }
        return {
            "input_ids": ask.prompt,
            "sampling_params": sampling,
            "stream": True,
            **self._settings.extra_body,
        }

    def converse(self, session: Session, source: PromptSource, first_index: int) -> Conversation:
        return TokenConversation(session, source, first_index)

    def hear(self, event: bytes) -> Heard:
        decoded = self._decoder.decode(event)
        if decoded.error is not None:
            return Heard(failure=decoded.error.message)
        meta = decoded.meta_info or _Meta()
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            return Heard(failure=reason.message or "aborted")
        # Every event has the count, text or none: half of a character is a token too.
        ids = decoded.output_ids if isinstance(decoded, _SglangAnswer) else []
        return Heard(
            output_count=meta.completion_tokens,
            has_text=meta.completion_tokens != 0,
            prompt_count=meta.prompt_tokens,
            cached_count=meta.cached_tokens,
            output_ids=ids,
            # All of them with every event; from newer servers, if they are started so, new ones.
            has_all_ids=len(ids) == meta.completion_tokens,
        )


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        """What a next turn keeps: reasoning is not part of it."""
        return self.text or (self.delta or _Delta()).content or ""

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _OpenAiEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class OpenAiDialect:
    """POST /v1/completions with token ids, or /v1/chat/completions with the text that they spell.

    Every event is asked to count the tokens so far (vLLM's and SGLang's extension); from a server
    that does not, each event with text is one token, and the last one has the sum.
    """

    def __init__(self, settings: Settings, model: str, decode: Decode | None) -> None:
        """decode: token ids to text, for a chat. None: prompts are posted as token ids."""
        self._settings = settings
        self._model = model
        self._decode = decode
        self.path = "/v1/completions" if decode is None else "/v1/chat/completions"
        self._decoder = msgspec.json.Decoder(_OpenAiEvent)

    def body(self, ask: Ask) -> dict[str, object]:
        prompt: Mapping[str, object] = {"prompt": ask.prompt}
        if self._decode is not None:
            said = (*ask.messages, ("user", self._decode(ask.prompt)))
            prompt = {"messages": [{"role": role, "content": text} for role, text in said]}
        elif ask.turn is not None:
            prompt = {"prompt": ask.prompt, "return_token_ids": True}
        return {
            "model": self._model,
            **prompt,
            "max_tokens": ask.output_count,
            "temperature": 0.0,
            "ignore_eos": self._settings.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._settings.extra_body,
        }

    def converse(self, session: Session, source: PromptSource, first_index: int) -> Conversation:
        if self._decode is None:
            return TokenConversation(session, source, first_index)
        return ChatConversation(session, source, first_index, self._decode)

    def hear(self, event: bytes) -> Heard:
        decoded = self._decoder.decode(event)
        if decoded.error is not None:
            return Heard(failure=decoded.error.message)
        usage = decoded.usage or _Usage()
        details = usage.prompt_tokens_details or _PromptDetails()
        choices = decoded.choices
        return Heard(
            output_count=usage.completion_tokens,
            has_text=any(choice.has_text for choice in choices),
            prompt_count=usage.prompt_tokens,
            cached_count=details.cached_tokens,
            output_ids=[one for choice in choices for one in choice.token_ids or []],
            text="".join(choice.said for choice in choices),
        )
