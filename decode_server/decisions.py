"""What the policies of the decode server answer: values that the scheduler applies."""

from __future__ import annotations

from dataclasses import dataclass

from common.failures import Failure
from common.scheduling.prefix_cache import Match
from common.transfers.connection import Connection
from decode_server.request import DecodeRequest


@dataclass(frozen=True, slots=True)
class Reserve:
    """Pages are there: ask this server for what is not here of the cache. match: what is."""

    request: DecodeRequest
    source: Connection
    match: Match


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """Pages are there: this server begins to compute the prompt. match: what is cached of it.

    is_rest: a prefill server could have been asked, and this is quicker.
    """

    request: DecodeRequest
    match: Match
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt's samples ask each for itself: their server knows of a room for each of them."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class KeepHere:
    """No prefill server is looked for any more."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Unbind:
    """The request is bound to its prefill server no more: any can compute it."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer the request with one error."""

    request: DecodeRequest
    failure: Failure


@dataclass(frozen=True, slots=True)
class Retry:
    """A transfer brought nothing: back to the queue.

    is_attempt: it counts as one of the request's attempts. is_computed_here: as `KeepHere`.
    """

    request: DecodeRequest
    is_attempt: bool = True
    is_computed_here: bool = False


WaitingDecision = KeepHere | Unbind | Fail
