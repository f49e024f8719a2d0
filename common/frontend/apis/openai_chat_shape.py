"""How a chat is told: messages with calls of tools, whole or in chunks, and log-probabilities.

Knows nothing of bodies.
"""

from __future__ import annotations

from common.frontend.apis.openai_logprobs import LogprobWriter
from common.frontend.apis.openai_run import Growth, finish_fields, stop_reason
from common.frontend.apis.parsed_output import ParsedOutput
from common.frontend.requests.generation import Continuation
from common.frontend.text.parsing.items import Reasoning, Said, ToolCall
from common.frontend.text.parsing.parsing import Parsing


class ChatShape:
    """chat.completion objects, and chunks whose first one tells only the role."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    has_prompt_in_choice = False

    def __init__(self, parsing: Parsing, writer: LogprobWriter, echo: str = "") -> None:
        """echo: what the message begins with before the model says anything."""
        self._echo = echo
        self._parsing = parsing
        self._writer = writer
        self._is_verbatim = parsing.is_verbatim
        self._outputs: dict[int, ParsedOutput] = {}  # by index of the sample

    def choice(self, one: Continuation) -> dict[str, object]:
        output = self._output(one)
        said = output.push(one.text)
        return {
            "index": one.sample.index,
            "message": message_fields(said, self._echo),
            "logprobs": self._logprobs(one, 0, one.settled_count()),
            **finish_fields(one),
            "finish_reason": output.finish_reason,
            "stop_reason": stop_reason(one),
            "token_ids": None,
        }

    def chunks(self, one: Continuation, growth: Growth) -> list[dict[str, object]]:
        running: dict[str, object] = {"finish_reason": None, "matched_stop": None}
        index = one.sample.index
        told: list[dict[str, object]] = []
        if growth.is_first:
            begun = {"role": "assistant", "content": ""}
            told.append({"index": index, "delta": begun, "logprobs": None, **running})
            if self._echo:
                echo = {"content": self._echo}
                told.append({"index": index, "delta": echo, "logprobs": None, **running})
        logprobs = self._logprobs(one, growth.start, growth.stop)
        deltas = self._deltas(one, growth.text)
        has_logprobs = logprobs is not None and growth.stop > growth.start
        if not deltas and (has_logprobs or growth.has_ids):
            deltas = [{"content": ""}]
        for delta in deltas:
            told.append({"index": index, "delta": delta, "logprobs": logprobs, **running})
            logprobs = None  # they are told once
        if one.is_ended:
            finish = {**finish_fields(one), "finish_reason": self._output(one).finish_reason}
            told.append({"index": index, "delta": {}, "logprobs": None, **finish})
        return told

    def reasoning_token_count(self, one: Continuation) -> int:
        return self._output(one).reasoning_token_count

    def _output(self, one: Continuation) -> ParsedOutput:
        index = one.sample.index
        if index not in self._outputs:
            self._outputs[index] = ParsedOutput(one, self._parsing)
        return self._outputs[index]

    def _deltas(self, one: Continuation, text: str) -> list[dict[str, object]]:
        if self._is_verbatim:  # most chats are, and each of their tokens comes here
            return [{"content": text}] if text else []
        output = self._output(one)
        deltas: list[dict[str, object]] = []
        place = output.call_count
        for item in output.push(text):
            match item:
                case str():
                    deltas.append({"content": item})
                case Reasoning():
                    deltas.append({"reasoning_content": item.text, "reasoning": item.text})
                case ToolCall():
                    deltas.append({"tool_calls": [{"index": place, **call_fields(item)}]})
                    place += 1
        return deltas

    def _logprobs(self, one: Continuation, start: int, stop: int) -> dict[str, object] | None:
        return self._writer.chat(one.logprobs[start:stop])


def message_fields(said: Said, echo: str = "") -> dict[str, object]:
    """A message with all members that SGLang's, vLLM's and OpenAI's have, null where there is
    nothing: clients read them as attributes. echo: what its content begins with."""
    content = echo + "".join(item for item in said if isinstance(item, str))
    thought = "".join(item.text for item in said if isinstance(item, Reasoning)) or None
    calls = [call_fields(item) for item in said if isinstance(item, ToolCall)] or None
    return {
        "role": "assistant",
        "content": (content or None) if calls else content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": calls,
        "reasoning_content": thought,
        "reasoning": thought,
    }


def call_fields(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
