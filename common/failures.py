"""How an accepted request can end other than well: every kind of error that clients may see.

A request that was accepted ends exactly once: with its output, or with one of these, before its
deadline and what a message takes. The kind is the `code` of OpenAI errors, `err_type` in SGLang's
finish_reason, and the label of `baton:failed_requests_total`. `docs/troubleshooting.md` says what
to do about each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    BAD_REQUEST = "bad_request"
    BAD_RESERVATION = "bad_reservation"
    PROMPT_MISMATCH = "prompt_mismatch"
    TOO_LARGE = "too_large"
    NO_TOKEN = "no_token"
    NOT_HELD = "not_held"
    ABORTED = "aborted"
    MOVED = "moved"
    OTHER_HALF_ABORTED = "other_half_aborted"
    RENDEZVOUS_TIMEOUT = "rendezvous_timeout"
    BAD_LOGITS = "bad_logits"
    UNFIT_TOKEN = "unfit_token"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_CORRUPTED = "transfer_corrupted"
    SCHEDULER_LOST = "scheduler_lost"
    OUTPUT_LOST = "output_lost"
    PEER_LOST = "peer_lost"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    NO_PREFILL_SERVER = "no_prefill_server"
    NO_DECODE_SERVER = "no_decode_server"
    STOPPING = "stopping"
    TIMED_OUT = "timed_out"
    HOLD_EXPIRED = "hold_expired"

    @property
    def status(self) -> int:
        """The HTTP status of a request that ends so."""
        return _STATUSES[self]

    @property
    def is_bootstrap(self) -> bool:
        """Whether the two halves of a routed request did not meet, or not as the same prompt."""
        return self in _BOOTSTRAP

    @property
    def is_peers_fault(self) -> bool:
        """Whether it tells something of the server that sent it, and not of the request."""
        return self in _PEERS

    @staticmethod
    def of(kind: str) -> FailureKind:
        """The kind that a peer names. One that this version does not know is a failed transfer."""
        return FailureKind(kind) if kind in _KNOWN else FailureKind.TRANSFER_FAILED


_STATUSES = {
    FailureKind.BAD_REQUEST: 400,
    FailureKind.BAD_RESERVATION: 400,
    FailureKind.PROMPT_MISMATCH: 400,
    FailureKind.TOO_LARGE: 400,
    FailureKind.NO_TOKEN: 400,
    FailureKind.NOT_HELD: 409,
    FailureKind.ABORTED: 499,
    FailureKind.MOVED: 503,
    FailureKind.OTHER_HALF_ABORTED: 500,
    FailureKind.RENDEZVOUS_TIMEOUT: 500,
    FailureKind.BAD_LOGITS: 500,
    FailureKind.UNFIT_TOKEN: 500,
    FailureKind.TRANSFER_FAILED: 500,
    FailureKind.TRANSFER_CORRUPTED: 500,
    FailureKind.SCHEDULER_LOST: 500,
    FailureKind.OUTPUT_LOST: 500,
    FailureKind.PEER_LOST: 503,
    FailureKind.QUEUE_FULL: 503,
    FailureKind.OVERLOADED: 503,
    FailureKind.NO_PREFILL_SERVER: 503,
    FailureKind.NO_DECODE_SERVER: 503,
    FailureKind.STOPPING: 503,
    FailureKind.TIMED_OUT: 504,
    FailureKind.HOLD_EXPIRED: 504,
}
_KNOWN = frozenset(map(str, FailureKind))
_BOOTSTRAP = (
    FailureKind.RENDEZVOUS_TIMEOUT,
    FailureKind.OTHER_HALF_ABORTED,
    FailureKind.PROMPT_MISMATCH,
)
_PEERS = (FailureKind.TRANSFER_FAILED, FailureKind.TRANSFER_CORRUPTED, FailureKind.BAD_LOGITS)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended. is_retryable: another server may do better. retry_after_s: when this one
    may, as far as it can tell; 0.0 if it can't."""

    kind: FailureKind
    message: str
    is_retryable: bool = False
    retry_after_s: float = 0.0

    @property
    def status(self) -> int:
        return self.kind.status
