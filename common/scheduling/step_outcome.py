"""What a step brought that has returned: values for whoever asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.failures import Failure, FailureKind
from common.protocol.worker import StepDone
from common.request import FinishReason, Speculated, TokenLogprobs
from common.scheduling.sequence import Sequence


class ChunkDone(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt are computed."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool
    prompt_logprobs: bytes


class TokensDone(msgspec.Struct, frozen=True):
    """A sequence has new tokens at its end, mostly one; `finish` says whether that ends it.

    logprobs: one entry per token if asked for. speculated: of this step.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    speculated: Speculated = Speculated()


class SamplesDrawn(msgspec.Struct, frozen=True):
    """The first tokens of the samples of a prompt, by request id. The prompt's own sequence is in
    no step any more, and has its pages."""

    sequence: Sequence
    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs]


class Undrawn(msgspec.Struct, frozen=True):
    """A sequence that got no token."""

    sequence: Sequence
    failure: Failure

    @staticmethod
    def of(sequence: Sequence, request_id: int, done: StepDone) -> Undrawn:
        """request_id: that no token was drawn for, the sequence's own or one of its samples'."""
        is_unfit = request_id in done.unfit  # no other server would do better
        kind = FailureKind.NO_TOKEN if is_unfit else FailureKind.BAD_LOGITS
        return Undrawn(sequence, Failure(kind, done.failed[request_id]))


@dataclass(slots=True)
class StepOutcome:
    """What a step brought. Order: chunks first, then tokens, as the worker computed them."""

    chunks: list[ChunkDone] = field(default_factory=list)
    tokens: list[TokensDone] = field(default_factory=list)
    samples: list[SamplesDrawn] = field(default_factory=list)
    failed: list[Undrawn] = field(default_factory=list)
