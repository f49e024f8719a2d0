"""How /v1/responses tells of an output: items, whole or grown by typed events.

Source: OpenAI's API reference, "Responses" and "Streaming events". Knows nothing of bodies' checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

from common.errors import RequestError
from common.frontend.apis.openai_call import OpenAiCall
from common.frontend.apis.openai_logprobs import LogprobWriter
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
from common.frontend.apis.responses_body import ResponsesFields
from common.frontend.apis.typed_run import Event
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.http.streaming import as_given
from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.parsing import Parsing
from common.frontend.text.tokenizer import Tokenizer
from common.request import FinishKind

ITEM_PREFIXES = {BlockKind.TEXT: "msg_", BlockKind.REASONING: "rs_", BlockKind.CALL: "fc_"}
PART_TYPES = {BlockKind.TEXT: "output_text", BlockKind.REASONING: "reasoning_text"}
CALL_ARGUMENTS = "function_call_arguments"
LENGTH_REASON = "max_output_tokens"


class ResponsesShape:
    """A response object, and the events of one. model: its name. wall: seconds since 1970."""

    def __init__(
        self,
        call: OpenAiCall,
        parsing: Parsing,
        given: ResponsesFields,
        tokenizer: Tokenizer,
        *,
        model: str,
        wall: Callable[[], float],
    ) -> None:
        self._call = call
        self._parsing = parsing
        self._given = given
        self._writer = LogprobWriter(tokenizer, call.told)
        self._model = model
        tools: list[JsonValue] = [_told_tool(one) for one in given.tools if isinstance(one, dict)]
        self._metadata = as_given(given.metadata)
        self._text = as_given({"format": {"type": "text"}, **given.text})
        self._tool_choice = as_given(given.tool_choice or "auto")
        self._tools = as_given(tools)
        self._wall = wall
        self._created_s = int(wall())
        self._event_count = 0
        self._output: OutputBlocks
        self._logprobs: dict[int, list[dict[str, object]]] = {}  # by index of the text's item
        self._untold: list[dict[str, object]] = []  # log-probabilities of no text so far

    def reply(self, one: Continuation) -> dict[str, object]:
        whole = Growth(text=one.text, start=0, stop=one.settled_count(), is_first=True)
        for _ in self.events(one, whole):
            pass
        return self._response(one)

    def events(self, one: Continuation, growth: Growth) -> Iterator[Event]:
        if growth.is_first:
            self._output = OutputBlocks(one, self._parsing)
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._response(None))
        if self._writer.tells_output:
            entries = one.logprobs[growth.start : growth.stop]
            self._untold += [self._writer.entry(entry) for entry in entries]
        for step in self._output.push(growth.text):
            yield from self._step(step)
        if one.is_ended:
            response = self._response(one)
            name = "completed" if response["status"] == "completed" else "incomplete"
            yield self._event(name, response=response)

    def failure(self, error: RequestError) -> Iterator[Event]:
        response = self._response(None) | {
            "status": "failed",
            "output": self._items(),
            "error": {"code": "server_error", "message": error.message},
        }
        yield self._event("failed", response=response)

    # ---- events ----------------------------------------------------------------------------------

    def _event(self, kind: str, /, **members: object) -> Event:
        self._event_count += 1
        return {
            "type": f"response.{kind}",
            "sequence_number": self._event_count - 1,
            **members,
        }

    def _step(self, step: BlockStep) -> Iterator[Event]:
        block = step.block
        item: dict[str, object] = {"output_index": block.index}
        place = {"item_id": self._item_id(block), **item}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        match step:
            case Opened():
                yield self._event("output_item.added", **item, item=self._item(block, is_open=True))
                if block.kind is not BlockKind.CALL:
                    part = self._part(block, is_open=True)
                    yield self._event("content_part.added", **place, part=part)
            case Grown():
                name = f"{self._content_name(block)}.delta"
                yield self._event(name, **place, delta=step.text, **self._new_logprobs(block))
            case Closed():
                yield from self._close(block, item, place)
            case _:
                assert_never(step)

    def _close(
        self, block: Block, item: dict[str, object], place: dict[str, object]
    ) -> Iterator[Event]:
        name = f"{self._content_name(block)}.done"
        if block.call is not None:
            yield self._event(name, **place, name=block.call.name, arguments=block.text)
        else:
            self._new_logprobs(block)  # of what ended the text
            part = self._part(block)
            told = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._event(name, **place, **told)
            yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", **item, item=self._item(block))

    def _new_logprobs(self, block: Block) -> dict[str, object]:
        """Those that came since the last text, which are this text's now."""
        if block.kind is not BlockKind.TEXT:
            return {}
        new, self._untold = self._untold, []
        self._logprobs.setdefault(block.index, []).extend(new)
        return {"logprobs": new}

    def _content_name(self, block: Block) -> str:
        return PART_TYPES.get(block.kind, CALL_ARGUMENTS)

    # ---- objects ---------------------------------------------------------------------------------

    def _item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIXES[block.kind]}{self._call.name.removeprefix('resp_')}_{block.index}"

    def _items(self) -> list[dict[str, object]]:
        return [self._item(block) for block in self._output.blocks]

    def _item(self, block: Block, *, is_open: bool = False) -> dict[str, object]:
        status = "in_progress" if is_open else "completed" if block.is_whole else "incomplete"
        item: dict[str, object] = {"id": self._item_id(block), "status": status}
        parts = [] if is_open else [self._part(block)]
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "message", "role": "assistant", **item, "content": parts}
            case BlockKind.REASONING:
                rest = {"summary": [], "content": parts, "encrypted_content": None}
                return {"type": "reasoning", **item, **rest}
            case BlockKind.CALL:
                assert block.call is not None
                call = {"call_id": block.call.call_id, "name": block.call.name}
                arguments = "" if is_open else block.text
                return {"type": "function_call", **item, **call, "arguments": arguments}
            case _:
                assert_never(block.kind)

    def _part(self, block: Block, *, is_open: bool = False) -> dict[str, object]:
        """What a message or reasoning holds; a call has none."""
        if block.kind is BlockKind.CALL:
            return {}
        part = {"type": PART_TYPES[block.kind], "text": "" if is_open else block.text}
        if block.kind is BlockKind.REASONING:
            return {**part}
        logprobs = [] if is_open else self._logprobs.get(block.index, [])
        return {**part, "annotations": [], "logprobs": logprobs}

    def _response(self, one: Continuation | None) -> dict[str, object]:
        """The response as it ended, or if `one` is None as it begins."""
        given, params = self._given, self._call.samples[0].sampling
        status, reason = ("in_progress", None) if one is None else _status(one)
        response: dict[str, object] = {
            "id": self._call.name,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(self._wall()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._model,
            "output": [] if one is None else self._items(),
            "usage": None if one is None else _usage(one, self._output.reasoning_token_count),
            "instructions": given.instructions or None,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": given.max_tool_calls,
            "metadata": self._metadata,
            "parallel_tool_calls": given.parallel_tool_calls,
            "prompt_cache_key": given.prompt_cache_key,
            "prompt_cache_retention": given.prompt_cache_retention,
            "reasoning": {"effort": given.reasoning.get("effort"), "summary": None},
            "safety_identifier": given.safety_identifier,
            "temperature": params.temperature,
            "text": self._text,
            "tool_choice": self._tool_choice,
            "tools": self._tools,
            "top_logprobs": given.top_logprobs,
            "top_p": params.top_p,
            "user": given.user,
            # What this server does, whatever was asked for.
            "background": False,
            "previous_response_id": None,
            "prompt": None,
            "conversation": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
        }
        if one is not None and self._call.transfer_params is not None:
            response["kv_transfer_params"] = self._call.transfer_params
        return response


def _told_tool(tool: JsonObject) -> JsonObject:
    """All of its members, as the SDK has them."""
    return {"description": None, "parameters": None, "strict": False, **tool}


def _status(one: Continuation) -> tuple[str, str | None]:
    """OpenAI's status, and why the response is incomplete."""
    assert one.finish is not None, "a failed sample is told as an error"
    match one.finish.kind:
        case FinishKind.STOP:
            return "completed", None
        case FinishKind.LENGTH:
            return "incomplete", LENGTH_REASON
        case FinishKind.ABORT:
            return "cancelled", None
        case _:
            assert_never(one.finish.kind)


def _usage(one: Continuation, reasoning_count: int) -> dict[str, object]:
    input_count, output_count = len(one.sample.token_ids), len(one.token_ids)
    return {
        "input_tokens": input_count,
        "input_tokens_details": {"cached_tokens": one.cached.count, "cache_write_tokens": 0},
        "output_tokens": output_count,
        "output_tokens_details": {"reasoning_tokens": reasoning_count},
        "total_tokens": input_count + output_count,
    }
