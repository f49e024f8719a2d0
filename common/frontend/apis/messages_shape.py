"""How /v1/messages tells of an output: blocks of content, whole or grown by typed events.

Source: Anthropic's API reference, "Messages" and "Streaming messages". Knows nothing of bodies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import assert_never

from common.errors import RequestError
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.openai_run import Growth
from common.frontend.apis.output_blocks import (
    Block,
    BlockKind,
    BlockStep,
    Closed,
    Grown,
    Opened,
    OutputBlocks,
)
from common.frontend.apis.typed_run import Event
from common.frontend.bodies.fields import JsonObject, parse_object
from common.frontend.http.errors import anthropic_error
from common.frontend.http.streaming import as_given
from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.parsing import Parsing
from common.request import FinishKind


class MessagesShape:
    """A message, and the events of one.

    model: its name. shows_thinking: else its blocks are there, without their text.
    """

    def __init__(
        self, call: OpenAiCall, parsing: Parsing, *, model: str, shows_thinking: bool
    ) -> None:
        self._call = call
        self._parsing = parsing
        self._model = model
        self._shows_thinking = shows_thinking
        self._output: OutputBlocks

    def reply(self, one: Continuation) -> dict[str, object]:
        self._output = OutputBlocks(one, self._parsing)
        self._output.push(one.text)
        content = [self._block(block) for block in self._output.blocks]
        reply = self._message() | self._end(one) | {"content": content, "usage": _usage(one)}
        return reply | self._transfer_params()

    def events(self, one: Continuation, growth: Growth) -> Iterator[Event]:
        if growth.is_first:
            self._output = OutputBlocks(one, self._parsing)
            usage = _usage(one) | {"output_tokens": 0}
            yield {"type": "message_start", "message": {**self._message(), "usage": usage}}
            yield {"type": "ping"}
        for step in self._output.push(growth.text):
            yield from self._step(step)
        if one.is_ended:
            end = {"delta": self._end(one), "usage": _usage(one)}
            yield {"type": "message_delta", **end, **self._transfer_params()}
            yield {"type": "message_stop"}

    def failure(self, error: RequestError) -> Iterator[Event]:
        yield anthropic_error(error)

    def _step(self, step: BlockStep) -> Iterator[Event]:
        block = step.block
        index = {"index": block.index}
        match step:
            case Opened():
                opened = self._block(block, is_open=True)
                yield {"type": "content_block_start", **index, "content_block": opened}
            case Grown():
                delta = self._delta(block, step.text)
                if delta is not None:
                    yield {"type": "content_block_delta", **index, "delta": delta}
            case Closed():
                yield {"type": "content_block_stop", **index}
            case _:
                assert_never(step)

    def _delta(self, block: Block, text: str) -> dict[str, object] | None:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text_delta", "text": text}
            case BlockKind.REASONING:
                shown = {"type": "thinking_delta", "thinking": text}
                return {**shown} if self._shows_thinking else None
            case BlockKind.CALL:
                spelled = json.dumps(_input(block), ensure_ascii=False)
                return {"type": "input_json_delta", "partial_json": spelled}
            case _:
                assert_never(block.kind)

    def _block(self, block: Block, *, is_open: bool = False) -> dict[str, object]:
        text = "" if is_open else block.text
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": text, "citations": None}
            case BlockKind.REASONING:
                thinking = text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": thinking, "signature": ""}
            case BlockKind.CALL:
                assert block.call is not None
                named = {"id": block.call.call_id, "name": block.call.name}
                return {
                    "type": "tool_use",
                    **named,
                    "input": as_given({} if is_open else _input(block)),
                }
            case _:
                assert_never(block.kind)

    def _message(self) -> dict[str, object]:
        """As it begins."""
        return {
            "id": self._call.name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self, one: Continuation) -> dict[str, object]:
        assert one.finish is not None, "a failed sample is told as an error"
        matched = one.finish.matched
        if one.finish.kind is FinishKind.STOP and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        # Anthropic has no word for an output that its client has aborted.
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(self._output.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _transfer_params(self) -> dict[str, object]:
        params = self._call.transfer_params
        return {} if params is None else {"kv_transfer_params": params}


def _input(block: Block) -> JsonObject:
    """A model may call with what is no object, which no client could read."""
    try:
        return parse_object(block.text.encode()) if block.text else {}
    except RequestError:
        return {"arguments": block.text}


def _usage(one: Continuation) -> dict[str, object]:
    """Tokens that were cached are counted apart from the others of the prompt."""
    cached_count = one.cached.count
    return {
        "input_tokens": len(one.sample.token_ids) - cached_count,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_count,
        "output_tokens": len(one.token_ids),
    }
