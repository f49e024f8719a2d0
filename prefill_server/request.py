"""One request on the prefill server: where it stands, and what is still on its way to the target.

The scheduler is its only writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import Verify
from common.protocol.peer import TransferRequest
from common.request import (
    CHUNK_MARK_COUNT_MAX,
    Origin,
    RequestTrace,
    SamplingParams,
    TokenLogprobs,
    TransferTrace,
)
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import PrefillEvent, PrefillState, next_prefill_state


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages of a decode server that wait for a cache, and the link they were announced on.

    peer: that server's incarnation. peer_name: what operators call it.
    verify: how much of it that server compares. layout: its own, msgpack.
    """

    link: str
    peer: str
    message: TransferRequest
    verify: Verify = Verify.OFF
    layout: bytes = b""
    peer_name: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended. is_retryable: another prefill server may do better."""

    kind: str
    message: str
    status: int
    is_retryable: bool = False


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """client_id: the frontend's id, or None if only the decode server knows of the request.

    is_ahead: it is computed before any decode server asks for it, and held until one does.
    sends_open: send id -> worker ranks that have not settled it yet.
    is_quiet: what has settled changes nothing at the target any more. False for good once the
        connection broke with bytes under way: then only the target's own fence proves it, and any
        word of ours would be taken for proof.
    short_since: when it was first found that its pages are not there; 0.0 if never.
    relief_seen: `PageAccount.relief_count` when that was found last.
    digests_open: worker ranks that have not digested the cache yet; digests: sums of those that
        have, per decode rank.
    """

    request_id: int
    client_id: int | None
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    arrived_at: float
    deadline: float
    room: int | None = None
    is_ahead: bool = False
    state: PrefillState = PrefillState.WAITING
    reservation: Reservation | None = None
    sequence: Sequence | None = None
    sends_open: dict[int, set[int]] = field(default_factory=dict)
    digests_open: set[int] = field(default_factory=set)
    digests: list[bytes] = field(default_factory=list)
    writers_settled: set[int] = field(default_factory=set)
    sent_token_count: int = 0
    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[bytes] = field(default_factory=list)
    failure: Failure | None = None
    is_quiet: bool = True
    is_abort_asked: bool = False
    short_since: float = 0.0
    relief_seen: int = -1
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    computed_at: float = 0.0
    paired_at: float = 0.0
    wire_s: float = 0.0
    nbytes: int = 0
    exposed_nbytes: int = 0
    run_count: int = 0
    chunk_count: int = 0
    cached_token_count: int = 0
    chunk_ends_s: list[float] = field(default_factory=list)
    origin: Origin = field(default_factory=Origin)

    def advance(self, event: PrefillEvent) -> None:
        self.state = next_prefill_state(self.state, event)

    def note_chunk(self, now: float) -> None:
        """A chunk of the prompt is computed."""
        self.chunk_count += 1
        if len(self.chunk_ends_s) < CHUNK_MARK_COUNT_MAX:
            self.chunk_ends_s.append(now - self.scheduled_at)

    @property
    def uses_credit(self) -> bool:
        """Whether its decode server brought its tokens, which it may only so often at a time."""
        return self.reservation is not None and self.reservation.message.room is None

    @property
    def is_on_its_way(self) -> bool:
        """Whether bytes or digests of it are outstanding."""
        return bool(self.sends_open or self.digests_open)

    def transfer_trace(self, now: float) -> TransferTrace:
        scheduled_at = self.scheduled_at or now
        computed_at = self.computed_at or now
        return TransferTrace(
            queue_s=scheduled_at - (self.queued_at or now),
            prefill_s=computed_at - scheduled_at,
            transfer_s=now - max(computed_at, self.paired_at),
            wire_s=self.wire_s,
            nbytes=self.nbytes,
            exposed_nbytes=self.exposed_nbytes,
            run_count=self.run_count,
            chunk_count=self.chunk_count,
            cached_token_count=self.cached_token_count,
            chunk_ends_s=list(self.chunk_ends_s),
        )

    def trace(self, now: float) -> RequestTrace:
        queued_at = self.queued_at or now
        return RequestTrace(
            request_id=self.client_id if self.client_id is not None else self.request_id,
            peer=self.reservation.peer_name if self.reservation is not None else "",
            status=self.failure.kind if self.failure is not None else "ok",
            message=self.failure.message if self.failure is not None else "",
            arrived_s=self.arrived_at,
            prompt_token_count=len(self.token_ids),
            output_token_count=0 if self.first_token is None else 1,
            cached_token_count=self.cached_token_count,
            reserve_s=queued_at - self.arrived_at,
            transfer=self.transfer_trace(now),
            ttft_s=now - self.arrived_at,
            e2e_s=now - self.arrived_at,
            origin=self.origin,
        )
