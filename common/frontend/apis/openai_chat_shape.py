"""How a chat is told: messages with calls of tools, whole or in chunks, and log-probabilities.

Knows nothing of bodies.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.frontend.apis.openai_run import Growth, finish_fields
from common.frontend.bodies.tools import ToolUse
from common.frontend.requests.generation import Continuation
from common.frontend.text.tokenizer import Tokenizer
from common.frontend.text.tool_calls import ToolCall, ToolParser, tool_parser
from common.request import TokenLogprobs


class ChatShape:
    """chat.completion objects, and chunks whose first one tells only the role."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    has_prompt_in_choice = False

    def __init__(self, tokenizer: Tokenizer, tools: ToolUse) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._parsers: dict[int, ToolParser] = {}  # by index of the sample
        self._call_counts: dict[int, int] = {}

    def choice(self, one: Continuation) -> dict[str, object]:
        said = list(self._said(one, one.text))
        content = "".join(item for item in said if isinstance(item, str))
        calls = [call_fields(item) for item in said if isinstance(item, ToolCall)]
        message: dict[str, object] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": one.sample.index,
            "message": message,
            "logprobs": self._logprobs(one, 0, one.settled_count()),
            **self._finish_fields(one),
        }

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        running: dict[str, object] = {"finish_reason": None, "matched_stop": None}
        index = one.sample.index
        told: list[dict[str, object]] = []
        if growth.is_first:
            begun = {"role": "assistant", "content": ""}
            told.append({"index": index, "delta": begun, "logprobs": None, **running})
        logprobs = self._logprobs(one, growth.start, growth.stop)
        deltas = self._deltas(one, growth.text)
        if not deltas and logprobs is not None and growth.stop > growth.start:
            deltas = [{"content": ""}]
        for delta in deltas:
            told.append({"index": index, "delta": delta, "logprobs": logprobs, **running})
            logprobs = None  # they are told once
        if one.is_ended:
            finish = self._finish_fields(one)
            told.append({"index": index, "delta": {}, "logprobs": None, **finish})
        return told

    def _deltas(self, one: Continuation, text: str) -> list[dict[str, object]]:
        index = one.sample.index
        deltas: list[dict[str, object]] = []
        for item in self._said(one, text):
            if isinstance(item, str):
                deltas.append({"content": item})
            else:
                place = self._call_counts[index] - 1
                deltas.append({"tool_calls": [{"index": place, **call_fields(item)}]})
        return deltas

    def _said(self, one: Continuation, text: str) -> Iterator[str | ToolCall]:
        """Text and calls in the next `text` of a sample, and the rest at its end; counts calls."""
        if self._tools.format is None:
            if text:
                yield text
            return
        index = one.sample.index
        if index not in self._parsers:
            self._parsers[index] = tool_parser(self._tools.format, self._tools.names)
            self._call_counts[index] = 0
        parser = self._parsers[index]
        for item in [*parser.push(text), *(parser.flush() if one.is_ended else [])]:
            if isinstance(item, ToolCall):
                self._call_counts[index] += 1
            yield item

    def _finish_fields(self, one: Continuation) -> dict[str, object]:
        fields = finish_fields(one)
        if self._call_counts.get(one.sample.index) and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

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


def call_fields(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
