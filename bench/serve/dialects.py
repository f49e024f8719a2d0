"""The three APIs of a load: their bodies, and the events of their streams.

Knows nothing of sockets or of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bench.serve.settings import Settings
from bench.serve.workload import Ask

Decode = Callable[[tuple[int, ...]], str]


@dataclass(frozen=True, slots=True)
class Heard:
    """The content of one event.

    output_count: tokens so far, None if the API does not report it. has_text: the event has
        visible text. prompt_count: tokens of the prompt, if reported. failure: why the request
        failed.
    """

    output_count: int | None = None
    has_text: bool = False
    prompt_count: int | None = None
    failure: str = ""


class Dialect(Protocol):
    """One API. path: where it is posted."""

    path: str

    def body(self, ask: Ask) -> dict[str, object]: ...

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
    finish_reason: _FinishReason | None = None


class _SglangEvent(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _Error | None = None


class SglangDialect:
    """POST /generate, which takes token ids and reports their count with every event."""

    path = "/generate"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._decoder = msgspec.json.Decoder(_SglangEvent)

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

    def hear(self, event: bytes) -> Heard:
        decoded = self._decoder.decode(event)
        if decoded.error is not None:
            return Heard(failure=decoded.error.message)
        meta = decoded.meta_info or _Meta()
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            return Heard(failure=reason.message or "aborted")
        # Every event has the count, text or none: half of a character is a token too.
        return Heard(meta.completion_tokens, meta.completion_tokens != 0, meta.prompt_tokens)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


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
            prompt = {"messages": [{"role": "user", "content": self._decode(ask.prompt)}]}
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

    def hear(self, event: bytes) -> Heard:
        decoded = self._decoder.decode(event)
        if decoded.error is not None:
            return Heard(failure=decoded.error.message)
        usage = decoded.usage or _Usage()
        has_text = any(choice.has_text for choice in decoded.choices)
        return Heard(usage.completion_tokens, has_text, usage.prompt_tokens)
