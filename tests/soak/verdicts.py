"""Whether what came back for a request is right. Knows nothing of sockets.

A `Half` is what one server said; a routed request has two. Each has all samples that were asked
for, and every one of them is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from tests.soak.golden import VOCAB_SIZE
from tests.soak.plans import Api, Plan, Side, Twist


class Verdict(StrEnum):
    """Worst last."""

    RIGHT = "right"
    ABORTED = "aborted"  # by us
    ERROR = "error"  # typed
    UNREACHABLE = "unreachable"  # nobody listened
    CUT = "cut"  # the connection broke
    HANG = "hang"
    WRONG = "wrong"


SEVERITY = list(Verdict)


class ErrorText(msgspec.Struct):
    message: str
    code: str | None = None


class Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct):
    finish_reason: Finish | None = None


class Choice(msgspec.Struct):
    text: str
    index: int = 0
    finish_reason: str | None = None


class Payload(msgspec.Struct):
    """A reply, an event or an error of either API. index: of the sample, in an event of several."""

    error: ErrorText | None = None
    index: int | None = None
    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    choices: list[Choice] = []


@dataclass(slots=True)
class Output:
    """One sample so far. ids: None where the API tells none. error: of this sample alone."""

    text: str = ""
    ids: list[int] | None = None
    finish: str = ""
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return self.finish in ("stop", "length") and not self.error


@dataclass(slots=True)
class Half:
    """What one server has said so far. error: of all samples."""

    sample_count: int = 1
    status: int = 0
    error: str = ""
    is_closed: bool = False
    event_count: int = 0
    trouble: tuple[Verdict, str] | None = field(default=None)
    outputs: list[Output] = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [Output() for _ in range(self.sample_count)]

    @property
    def is_ended(self) -> bool:
        return all(output.finish for output in self.outputs)

    def take(self, raw: bytes | str, *, is_event: bool) -> None:
        """Take a body or an event. Raises: msgspec.DecodeError if it has no known shape."""
        found = msgspec.json.decode(raw, type=Payload | list[Payload])
        self.event_count += 1
        if isinstance(found, Payload):
            self._take_payload(found, raw, is_event=is_event)
            return
        if is_event or self.sample_count == 1 or len(found) != self.sample_count:
            raise msgspec.ValidationError(f"{len(found)} of {self.sample_count} samples: {raw!r}")
        for output, payload in zip(self.outputs, found, strict=True):
            _take_generated(output, payload, raw)

    def _take_payload(self, payload: Payload, raw: bytes | str, *, is_event: bool) -> None:
        if payload.error is not None:
            if not payload.error.message:
                raise msgspec.ValidationError(f"an error without a message: {raw!r}")
            self.error = payload.error.code or payload.error.message
        elif payload.choices:
            if not is_event and len(payload.choices) != self.sample_count:
                raise msgspec.ValidationError(f"not {self.sample_count} choices: {raw!r}")
            for choice in payload.choices:
                output = self._output(choice.index, raw)
                output.text = output.text + choice.text if is_event else choice.text
                output.finish = choice.finish_reason or output.finish
        else:
            # A reply of several samples is a list, and each of their events has an index.
            if (payload.index is None) != (self.sample_count == 1):
                raise msgspec.ValidationError(f"for {self.sample_count} samples: {raw!r}")
            _take_generated(self._output(payload.index or 0, raw), payload, raw)

    def _output(self, index: int, raw: bytes | str) -> Output:
        if not 0 <= index < self.sample_count:
            raise msgspec.ValidationError(f"sample {index} of {self.sample_count}: {raw!r}")
        return self.outputs[index]


def _take_generated(output: Output, payload: Payload, raw: bytes | str) -> None:
    """A sample of /generate, whose events are cumulative."""
    if payload.text is None or payload.output_ids is None:
        raise msgspec.ValidationError(f"neither a reply nor an error: {raw!r}")
    output.text, output.ids = payload.text, payload.output_ids
    finish = payload.meta_info.finish_reason if payload.meta_info else None
    if finish is not None:
        output.finish = finish.type
        if finish.status_code is not None:
            output.error = finish.message or "no message"


def judge_half(plan: Plan, side: Side, half: Half) -> tuple[Verdict, str]:
    """What one server's answer to `plan` is worth."""
    if half.trouble is not None and half.trouble[0] is Verdict.WRONG:
        return half.trouble
    for index, output in enumerate(half.outputs):
        problem = _find_mistake(plan, side, output, is_cut=bool(half.error))
        if problem:
            return Verdict.WRONG, f"{side}, sample {index}: {problem}"
    if half.trouble is not None:
        return half.trouble
    if half.error:
        if plan.twist is Twist.BAD and half.status in plan.bad_statuses:
            return Verdict.RIGHT, ""
        return Verdict.ERROR, f"{side} {half.status} {half.error}"
    if plan.twist is Twist.BAD:
        return Verdict.WRONG, f"{plan.flaw} was answered {half.status}"
    return _worst([_judge_output(plan, side, half, output) for output in half.outputs])


def _judge_output(plan: Plan, side: Side, half: Half, output: Output) -> tuple[Verdict, str]:
    """How one sample ended."""
    if output.error:
        return Verdict.ERROR, f"{side} {half.status} {output.error}"
    if output.finish == "abort":
        # A routed request ends on both sides when one half of it is given up.
        if plan.twisted_sides:
            return Verdict.ABORTED, ""
        return Verdict.WRONG, f"{side}: aborted although nobody asked for it"
    if not output.finish:
        return Verdict.WRONG, f"{side}: status {half.status} ended without a finish reason"
    return Verdict.RIGHT, ""


def judge(plan: Plan, halves: dict[Side, Half]) -> tuple[Verdict, str]:
    """The worst of the halves, but what one loses by our doing is not the other's mistake."""
    verdicts = [judge_half(plan, side, half) for side, half in halves.items()]
    verdict, detail = _worst(verdicts)
    is_ours = plan.twisted_sides and verdict is Verdict.ERROR
    if is_ours and any(verdict is Verdict.ABORTED for verdict, _ in verdicts):
        return Verdict.ABORTED, ""
    if verdict in (Verdict.WRONG, Verdict.HANG):
        detail = f"{plan}: {detail}"
    return verdict, detail


def _worst(verdicts: Sequence[tuple[Verdict, str]]) -> tuple[Verdict, str]:
    return max(verdicts, key=lambda one: SEVERITY.index(one[0]))


def _find_mistake(plan: Plan, side: Side, output: Output, *, is_cut: bool) -> str:
    """Tokens or text that can't be right, also of a sample that was cut short; "" if none."""
    golden = plan.golden
    is_whole = output.is_whole and not is_cut
    if plan.twist is Twist.BAD:
        return ""
    if plan.twist is Twist.SAMPLED:
        return _find_misshape(plan, output)
    if side is Side.PREFILL:
        if output.ids is not None and output.ids != golden.output_ids[: len(output.ids)]:
            return f"ids {output.ids}, expected {golden.output_ids[:1]}"
        if is_whole and output.ids is not None and len(output.ids) != 1:
            return f"{len(output.ids)} tokens, expected 1"
        if not golden.text.startswith(output.text.rstrip("\ufffd")):
            return f"{output.text!r} does not begin {golden.text!r}"
        return ""
    if output.ids is not None:
        expected = golden.output_ids if is_whole else golden.output_ids[: len(output.ids)]
        if output.ids != expected:
            return f"ids {output.ids}, expected {expected}"
    if is_whole and (output.text, output.finish) != (golden.text, golden.finish):
        got, expected_text = (output.text, output.finish), (golden.text, golden.finish)
        return f"{got!r}, expected {expected_text!r}"
    # The last character of a text that was cut may be half a character.
    if not is_whole and not golden.text.startswith(output.text.rstrip("\ufffd")):
        return f"{output.text!r} does not begin {golden.text!r}"
    return ""


def _find_misshape(plan: Plan, output: Output) -> str:
    """What is wrong with a drawn output, whose tokens nobody knows."""
    if plan.api is not Api.GENERATE or output.ids is None:
        return ""
    is_sound = all(0 <= token < VOCAB_SIZE for token in output.ids)
    if not is_sound or len(output.ids) > plan.golden.prompt.max_new_tokens:
        return f"drawn ids {output.ids}"
    return ""
