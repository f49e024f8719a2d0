"""What a step brought that has returned: values for whoever asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.failures import Failure
from common.request import FinishReason, TokenLogprobs
from common.scheduling.sequence import Sequence


class ChunkDone(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt are computed."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool
    prompt_logprobs: bytes


class TokenDone(msgspec.Struct, frozen=True):
    """A sequence has a new token at its end; `finish` says whether it was the last one."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


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


@dataclass(slots=True)
class StepOutcome:
    """What a step brought. Order: chunks first, then tokens, as the worker computed them."""

    chunks: list[ChunkDone] = field(default_factory=list)
    tokens: list[TokenDone] = field(default_factory=list)
    samples: list[SamplesDrawn] = field(default_factory=list)
    failed: list[Undrawn] = field(default_factory=list)
