"""Whether what came back for a request is right. Knows nothing of sockets.

A `Half` is what one server said; a routed request has two.
"""

from __future__ import annotations

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
    finish_reason: str | None = None


class Payload(msgspec.Struct):
    """A reply, an event or an error of either API."""

    error: ErrorText | None = None
    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    choices: list[Choice] = []


@dataclass(slots=True)
class Half:
    """What one server has said so far. ids: None where the API tells none."""

    status: int = 0
    text: str = ""
    ids: list[int] | None = None
    finish: str = ""
    error: str = ""
    is_closed: bool = False
    event_count: int = 0
    trouble: tuple[Verdict, str] | None = field(default=None)

    def take(self, raw: bytes | str, *, is_event: bool) -> None:
        """Take a body or an event. Raises: msgspec.DecodeError if it has no known shape."""
        payload = msgspec.json.decode(raw, type=Payload)
        self.event_count += 1
        if payload.error is not None:
            if not payload.error.message:
                raise msgspec.ValidationError(f"an error without a message: {raw!r}")
            self.error = payload.error.code or payload.error.message
        elif payload.choices:
            choice = payload.choices[0]
            self.text = self.text + choice.text if is_event else choice.text
            self.finish = choice.finish_reason or self.finish
        elif payload.text is not None and payload.output_ids is not None:
            self.text, self.ids = payload.text, payload.output_ids
            finish = payload.meta_info.finish_reason if payload.meta_info else None
            if finish is not None:
                self.finish = finish.type
                if finish.status_code is not None:
                    self.error = finish.message or "no message"
        else:
            raise msgspec.ValidationError(f"neither a reply nor an error: {raw!r}")


def judge_half(plan: Plan, side: Side, half: Half) -> tuple[Verdict, str]:
    """What one server's answer to `plan` is worth."""
    if half.trouble is not None and half.trouble[0] is Verdict.WRONG:
        return half.trouble
    problem = _find_mistake(plan, side, half)
    if problem:
        return Verdict.WRONG, problem
    if half.trouble is not None:
        return half.trouble
    if half.error:
        if plan.twist is Twist.BAD and half.status in plan.bad_statuses:
            return Verdict.RIGHT, ""
        return Verdict.ERROR, f"{side} {half.status} {half.error}"
    if plan.twist is Twist.BAD:
        return Verdict.WRONG, f"{plan.flaw} was answered {half.status}"
    if half.finish == "abort":
        # A routed request ends on both sides when one half of it is given up.
        if plan.twisted_sides:
            return Verdict.ABORTED, ""
        return Verdict.WRONG, f"{side}: aborted although nobody asked for it"
    if not half.finish:
        return Verdict.WRONG, f"{side}: status {half.status} ended without a finish reason"
    return Verdict.RIGHT, ""


def judge(plan: Plan, halves: dict[Side, Half]) -> tuple[Verdict, str]:
    """The worst of the halves, but what one loses by our doing is not the other's mistake."""
    verdicts = [judge_half(plan, side, half) for side, half in halves.items()]
    worst = max(verdicts, key=lambda one: SEVERITY.index(one[0]))
    is_ours = plan.twisted_sides and worst[0] is Verdict.ERROR
    if is_ours and any(verdict is Verdict.ABORTED for verdict, _ in verdicts):
        return Verdict.ABORTED, ""
    return worst


def _find_mistake(plan: Plan, side: Side, half: Half) -> str:
    """Tokens or text that can't be right, also of an answer that was cut short; "" if none."""
    golden = plan.golden
    is_whole = half.finish in ("stop", "length") and not half.error
    if plan.twist is Twist.BAD:
        return ""
    if plan.twist is Twist.SAMPLED:
        return _find_misshape(plan, half)
    if side is Side.PREFILL:
        if half.ids is not None and half.ids != golden.output_ids[: len(half.ids)]:
            return f"{plan.rid} prefill: ids {half.ids}, expected {golden.output_ids[:1]}"
        if is_whole and half.ids is not None and len(half.ids) != 1:
            return f"{plan.rid} prefill: {len(half.ids)} tokens, expected 1"
        if not golden.text.startswith(half.text.rstrip("\ufffd")):
            return f"{plan.rid} prefill: {half.text!r} does not begin {golden.text!r}"
        return ""
    if half.ids is not None:
        expected = golden.output_ids if is_whole else golden.output_ids[: len(half.ids)]
        if half.ids != expected:
            return f"{plan.rid} decode: ids {half.ids}, expected {expected}"
    if is_whole and (half.text, half.finish) != (golden.text, golden.finish):
        got, expected_text = (half.text, half.finish), (golden.text, golden.finish)
        return f"{plan.rid} decode: {got!r}, expected {expected_text!r}"
    # The last character of a text that was cut may be half a character.
    if not is_whole and not golden.text.startswith(half.text.rstrip("\ufffd")):
        return f"{plan.rid} decode: {half.text!r} does not begin {golden.text!r}"
    return ""


def _find_misshape(plan: Plan, half: Half) -> str:
    """What is wrong with a drawn output, whose tokens nobody knows."""
    if plan.api is not Api.GENERATE or half.ids is None:
        return ""
    is_sound = all(0 <= token < VOCAB_SIZE for token in half.ids)
    if not is_sound or len(half.ids) > plan.golden.prompt.max_new_tokens:
        return f"{plan.rid}: sampled ids {half.ids}"
    return ""
