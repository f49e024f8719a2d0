"""Prompts that are computed before any decode server asks for them, as proxies want it that go to
the prefill server first and to the decode server with what it says.

    submitted -> queued -> computed: its client is answered -> held under its room -> transferred
                                                                    -> nobody came: given up

Knows nothing of how a cache is sent.
"""

from __future__ import annotations

from collections import deque

from common.protocol.frontend import Tokens
from common.request import FinishKind, FinishReason
from common.scheduling.peers import Outbox
from common.scheduling.transitions import PrefillEvent, PrefillState
from prefill_server.rendezvous import NEVER_CAME, Rendezvous
from prefill_server.request import Failure, PrefillRequest, Reservation
from prefill_server.requests import RequestTable

# Nobody asked for a held cache; also the name under which that is counted.
HOLD_EXPIRED = "hold_expired"
NOT_HELD = "not_held"
# So long nobody's need is a reason to give up a held cache.
UNDISTURBED_S = 5.0


class Holds:
    """Composed of the parts that hold something of a request."""

    def __init__(self, table: RequestTable, rendezvous: Rendezvous, outbox: Outbox) -> None:
        self._table = table
        self._rendezvous = rendezvous
        self._outbox = outbox
        # In the order in which they were computed; those that ended stay until they are first.
        self._held: deque[PrefillRequest] = deque()

    def begin(self, request: PrefillRequest, now: float) -> None:
        """Its pages are reserved and it is computed as if it were paired."""
        request.queued_at = now
        request.advance(PrefillEvent.AHEAD)
        self._table.queue.add(request)

    def hold(self, request: PrefillRequest, now: float) -> Reservation | None:
        """The prompt is computed: answer, and wait for who wants it; a reservation that is there
        already, for a decode server may guess."""
        assert request.room is not None and request.first_token is not None
        assert request.client_id is not None
        request.advance(PrefillEvent.COMPUTED_AHEAD)
        self._held.append(request)
        self._outbox.to_frontend(
            Tokens(
                request.client_id,
                [request.first_token],
                logprobs=[request.first_logprobs] if request.first_logprobs is not None else [],
                cached_token_count=request.cached_token_count,
                finish=FinishReason(FinishKind.LENGTH),
                trace=request.trace(now),
            )
        )
        self._table.release_client(request)
        return self._rendezvous.offer(request.room, request, now)

    def oldest(self, now: float) -> PrefillRequest | None:
        """The cache to give up if somebody else waits for its pages: it is held longest, and its
        decode server had time to ask. Computing it again costs less than a server that stands."""
        while self._held and self._held[0].state is not PrefillState.HELD:
            self._held.popleft()
        if not self._held or now - self._held[0].computed_at < UNDISTURBED_S:
            return None
        return self._held[0]

    def why_missing(self, room: int) -> Failure | None:
        """Why a cache that a decode server has heard of is not here; None if it is, or will be."""
        request = self._table.of_room(room)
        if request is not None and request.is_ahead:
            return None
        text = f"no cache is held under room {room}"
        return Failure(NOT_HELD, text, 409, is_retryable=True)


def expired(request: PrefillRequest) -> Failure:
    """What becomes of a half whose other one never came."""
    if request.is_ahead:
        return Failure(HOLD_EXPIRED, "no decode server asked for the cache in time", 504)
    return NEVER_CAME
