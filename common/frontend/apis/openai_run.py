"""Runs one OpenAI call and tells of it, whole or in chunks. The two dialects differ by a `Shape`.

Knows nothing of bodies.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec
import orjson

from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.openai_logprobs import LogprobWriter
from common.frontend.context import FrontendContext
from common.frontend.http.errors import raise_failed
from common.frontend.http.streaming import DONE, EVENT_END, EVENT_START
from common.frontend.requests.generation import Continuation, SampleGroup

NULLS: dict[str, object] = dict.fromkeys(
    ("service_tier", "system_fingerprint", "kv_transfer_params")
)
"""What an answer has beside its choices if there is something to tell: SGLang, vLLM and OpenAI
send null otherwise, and clients read them as attributes."""
PROMPT_NULLS: dict[str, object] = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
"""As `NULLS`, where the prompt's stand."""


class Growth(msgspec.Struct, frozen=True):
    """The new part of a sample: text, and tokens [start, stop) that begin to show with it.

    has_ids: there are new token ids, which are told also where no text came.
    """

    text: str
    start: int
    stop: int
    is_first: bool
    has_ids: bool = False


class Shape(Protocol):
    """How a dialect tells of samples."""

    object_name: str
    chunk_object_name: str
    has_prompt_in_choice: bool  # where the ids of the prompt stand; else beside the choices

    def choice(self, one: Continuation) -> dict[str, object]:
        """A sample that has ended."""

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        """Choices of the chunks that tell of `growth`; none if there is nothing to tell."""

    def reasoning_token_count(self, one: Continuation) -> int:
        """How much of a sample that has been told of is reasoning."""


class OpenAiRun:
    """One call on its way to a reply."""

    def __init__(
        self, context: FrontendContext, call: OpenAiCall, shape: Shape, trace_parent: str
    ) -> None:
        self._context = context
        self._trace_parent = trace_parent
        self._call = call
        self._shape = shape
        self._created_s = int(context.clock.wall())

    async def reply(self) -> dict[str, object]:
        """Raises: RequestError if a sample failed; the others are cancelled then."""
        async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
            group.submit(is_streaming=False)
            async for ended in group.changes():
                raise_failed(one.failure for one in ended)
        choices = [self._shape.choice(one) for one in group.continuations]
        reply = {
            **self._head(self._shape.object_name),
            "choices": choices,
            "usage": _usage(group.continuations, self._call, self._shape),
            **NULLS,
            **({} if self._shape.has_prompt_in_choice else PROMPT_NULLS),
        }
        if self._call.transfer_params is not None:
            reply["kv_transfer_params"] = self._call.transfer_params
        if self._call.told.prompt_count is not None:
            writer = LogprobWriter(self._context.tokenizer, self._call.told)
            for choice, one in zip(choices, group.continuations, strict=True):
                where = choice if self._shape.has_prompt_in_choice else reply
                where["prompt_logprobs"] = writer.prompt(one.prompt_logprobs)
        if self._call.tells_ids:
            for choice, one in zip(choices, group.continuations, strict=True):
                choice["token_ids"] = one.token_ids
                where = choice if self._shape.has_prompt_in_choice else reply
                where["prompt_token_ids"] = one.sample.token_ids
        return reply

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises: RequestError if a sample failed; the others are cancelled then."""
        stream = _Stream(self._call, self._shape, self._head(self._shape.chunk_object_name))
        async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
            group.submit(is_streaming=True)
            async for grown in group.changes():
                raise_failed(one.failure for one in grown)
                told = b"".join(map(stream.events, grown))
                if group.is_over:
                    told += stream.last_event(group.continuations) + DONE
                if told:
                    yield told

    def _head(self, object_name: str) -> dict[str, object]:
        return {
            "id": self._call.name,
            "object": object_name,
            "created": self._created_s,
            "model": self._context.config.served_model_name,
        }


class _Stream:
    """A stream as bytes. The part that is equal in all chunks is encoded once.

    head: the first fields of every chunk.
    """

    def __init__(self, call: OpenAiCall, shape: Shape, head: dict[str, object]) -> None:
        self._call = call
        self._shape = shape
        self._start = EVENT_START + orjson.dumps(head)[:-1] + b',"choices":['
        self._told: dict[int, tuple[int, int]] = {}  # by index: pieces of text and tokens told
        self._reported_ids: dict[int, int] = {}  # by index: token ids told

    def events(self, one: Continuation) -> bytes:
        """Of the new part of a sample; none if nothing of it can be sent yet."""
        index = one.sample.index
        piece_count, start = self._told.get(index, (0, 0))
        growth = Growth(
            text="".join(one.pieces[piece_count:]),
            start=start,
            stop=one.settled_count(),
            is_first=index not in self._told,
            has_ids=self._call.tells_ids and len(one.token_ids) > self._reported_ids.get(index, 0),
        )
        self._told[index] = (len(one.pieces), growth.stop)
        return b"".join([self._event(choice, one) for choice in self._shape.chunks(one, growth)])

    def last_event(self, continuations: list[Continuation]) -> bytes:
        """Of the usage of all samples together, if that is asked for."""
        if not self._call.includes_usage:
            return b""
        return self._start + _tail({"usage": _usage(continuations, self._call, self._shape)})

    def _event(self, choice: dict[str, object], one: Continuation) -> bytes:
        rest: dict[str, object] = {}
        if self._call.has_running_usage:
            rest["usage"] = _usage([one], self._call, self._shape)
        elif self._call.includes_usage:
            rest["usage"] = None
        if one.is_ended and self._call.transfer_params is not None:
            rest["kv_transfer_params"] = self._call.transfer_params
        if self._call.tells_ids:
            self._add_ids(rest, choice, one)
        return self._start + orjson.dumps(choice) + _tail(rest)

    def _add_ids(
        self, rest: dict[str, object], choice: dict[str, object], one: Continuation
    ) -> None:
        """The ids that are new since the chunk before; in the first one the prompt's too."""
        index = one.sample.index
        if index not in self._reported_ids:
            where = choice if self._shape.has_prompt_in_choice else rest
            where["prompt_token_ids"] = one.sample.token_ids
        choice["token_ids"] = one.token_ids[self._reported_ids.get(index, 0) :]
        self._reported_ids[index] = len(one.token_ids)


def _tail(rest: dict[str, object]) -> bytes:
    """The end of an event, from behind its choices."""
    return b"]," + orjson.dumps(rest)[1:] + EVENT_END if rest else b"]}" + EVENT_END


def _usage(told: list[Continuation], call: OpenAiCall, shape: Shape) -> dict[str, object]:
    return usage_fields(told, call.n, sum(map(shape.reasoning_token_count, told)))


def usage_fields(
    continuations: list[Continuation], n: int, reasoning_count: int = 0
) -> dict[str, object]:
    """A prompt counts once, however many samples, `n`, were drawn for it. reasoning_count: tokens
    of all outputs together, told where OpenAI and where SGLang have them."""
    of_prompt = {one.sample.index // n: one for one in reversed(continuations)}
    prompt_count = sum(len(one.sample.token_ids) for one in of_prompt.values())
    output_count = sum(len(one.token_ids) for one in continuations)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": output_count,
        "total_tokens": prompt_count + output_count,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached.count for one in of_prompt.values())
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_count},
        "reasoning_tokens": reasoning_count,
    }


def finish_fields(one: Continuation) -> dict[str, object]:
    """finish_reason and matched_stop; both null while the sample runs."""
    if one.finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": str(one.finish.kind), "matched_stop": one.finish.matched}


def stop_reason(one: Continuation) -> int | str | None:
    """vLLM's: the stop string or the stop token that the client named; null for the model's own."""
    matched = None if one.finish is None else one.finish.matched
    is_own = isinstance(matched, int) and matched not in one.sample.sampling.stop_token_ids
    return None if is_own else matched
