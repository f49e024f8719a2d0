"""One request on the prefill server. `requests` is its only writer."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.failures import Failure
from common.protocol.frontend import Sibling
from common.request import (
    CachedTokens,
    Claim,
    Origin,
    RequestTrace,
    SamplingParams,
    TokenLogprobs,
    TransferTrace,
)
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import PrefillState
from common.transfers.outgoing import OutgoingTransfer


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """clients: the samples of the prompt that a client waits for, by their place among all; none if
    only the decode server knows of the request. seeds: of all samples, also of those whose clients
    have left.
    digests: of its prompt's beginnings (see prefix_digests.py).
    is_ahead: it is computed before any decode server asks for it, and held until one does.
    transfer: to the decode server that asked for it; None before one has.
    short_since: when it was first found that its pages are not there; 0.0 if never.
    relief_seen: `PageAccount.relief_count` when that was found last.
    claim: what decides whose turn it is.
    """

    request_id: int
    clients: dict[int, Sibling]
    seeds: list[int]
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    arrived_at: float
    deadline: float
    digests: bytes = b""
    room: int | None = None
    is_ahead: bool = False
    state: PrefillState = PrefillState.WAITING
    transfer: OutgoingTransfer | None = None
    sequence: Sequence | None = None
    first_tokens: list[int] = field(default_factory=list)
    first_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[bytes] = field(default_factory=list)
    failure: Failure | None = None
    short_since: float = 0.0
    relief_seen: int = -1
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    computed_at: float = 0.0
    paired_at: float = 0.0
    chunk_count: int = 0
    cached_token_count: int = 0
    chunk_ends_s: list[float] = field(default_factory=list)
    origin: Origin = field(default_factory=Origin)
    claim: Claim = field(default_factory=Claim)

    @property
    def uses_credit(self) -> bool:
        """Whether its decode server brought its tokens, which it may only so often at a time."""
        return self.transfer is not None and self.transfer.room is None

    @property
    def is_self_test(self) -> bool:
        return self.transfer is not None and self.transfer.request.is_self_test

    @property
    def is_sending(self) -> bool:
        """Whether puts of it are outstanding."""
        return self.transfer is not None and bool(self.transfer.sends_open)

    @property
    def is_on_its_way(self) -> bool:
        """Whether puts or digests of it are outstanding."""
        return self.transfer is not None and self.transfer.is_on_its_way

    def transfer_trace(self, now: float) -> TransferTrace:
        scheduled_at = self.scheduled_at or now
        computed_at = self.computed_at or now
        sent = self.transfer
        return TransferTrace(
            queue_s=scheduled_at - (self.queued_at or now),
            prefill_s=computed_at - scheduled_at,
            transfer_s=now - max(computed_at, self.paired_at),
            wire_s=sent.wire_s if sent is not None else 0.0,
            nbytes=sent.nbytes if sent is not None else 0,
            exposed_nbytes=sent.exposed_nbytes if sent is not None else 0,
            run_count=sent.run_count if sent is not None else 0,
            chunk_count=self.chunk_count,
            cached_token_count=self.cached_token_count,
            chunk_ends_s=list(self.chunk_ends_s),
        )

    def traces(self, now: float) -> list[tuple[int, RequestTrace]]:
        """The account of each client's sample, by its place. What a transfer moved counts once."""
        traces: list[tuple[int, RequestTrace]] = []
        for place, sample in self.clients.items():
            trace = self.trace(now, sample.request_id, sample.origin)
            if traces:
                once = msgspec.structs.replace(
                    trace.transfer, nbytes=0, exposed_nbytes=0, run_count=0, wire_s=0.0
                )
                trace = msgspec.structs.replace(trace, transfer=once)
            traces.append((place, trace))
        return traces

    def trace(
        self, now: float, request_id: int | None = None, origin: Origin | None = None
    ) -> RequestTrace:
        """request_id, origin: of a client's sample."""
        queued_at = self.queued_at or now
        own = origin or self.origin
        asked_by = self.transfer.request.origin.trace_parent if self.transfer is not None else ""
        if asked_by:
            own = msgspec.structs.replace(own, trace_parent=asked_by)
        return RequestTrace(
            request_id=self.request_id if request_id is None else request_id,
            peer=self.transfer.peer_name if self.transfer is not None else "",
            status=self.failure.kind if self.failure is not None else "ok",
            message=self.failure.message if self.failure is not None else "",
            arrived_s=self.arrived_at,
            prompt_token_count=len(self.token_ids),
            output_token_count=1 if self.first_tokens else 0,
            cached=CachedTokens(prefill=self.cached_token_count),
            reserve_s=queued_at - self.arrived_at,
            transfer=self.transfer_trace(now),
            ttft_s=now - self.arrived_at,
            e2e_s=now - self.arrived_at,
            origin=own,
        )
