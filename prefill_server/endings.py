"""How a request of the prefill server ends: who is told what, and when its pages come back.

The client is answered as soon as the end is known. The decode server gets its one terminal message
only when no step and no put of the request is outstanding, because it takes that as proof.
"""

from __future__ import annotations

import msgspec

from common.protocol.frontend import Failed, Tokens, Traced
from common.protocol.peer import Quiesced, TransferDone, TransferFailed
from common.request import FinishKind, FinishReason, TransferTrace
from common.scheduling.batcher import Batcher
from common.scheduling.peers import Outbox
from common.scheduling.sequence import PageAccount
from common.scheduling.transitions import PrefillEvent, PrefillState
from prefill_server.credits import Credits
from prefill_server.decode_peers import DecodePeers
from prefill_server.holds import HOLD_EXPIRED
from prefill_server.rendezvous import Rendezvous
from prefill_server.request import Failure, PrefillRequest, Reservation
from prefill_server.requests import RequestTable
from prefill_server.sender import Sender
from prefill_server.transfer_health import TransferHealth

COUNTED = (
    *("finished", "transfer_failed", "bootstrap_failed", "aborted", "timed_out"),
    HOLD_EXPIRED,
)
# Kinds that say that a request's other half never came.
BOOTSTRAP_FAILURES = ("rendezvous_timeout", "other_half_aborted", "prompt_mismatch")
ENDED = (PrefillState.DRAINING, PrefillState.FINISHED, PrefillState.FAILED)


class Endings:
    """Ends requests. Composed of the parts that hold something of theirs."""

    def __init__(
        self,
        table: RequestTable,
        account: PageAccount,
        batcher: Batcher,
        sender: Sender,
        rendezvous: Rendezvous,
        peers: DecodePeers,
        credits: Credits,
        transfer_health: TransferHealth,
        outbox: Outbox,
    ) -> None:
        self._table = table
        self._account = account
        self._batcher = batcher
        self._sender = sender
        self._rendezvous = rendezvous
        self._peers = peers
        self._credits = credits
        self._transfer_health = transfer_health
        self._outbox = outbox
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def finish(self, request: PrefillRequest, now: float) -> None:
        """Everything is flushed at the target: tell the decode server and the client."""
        reservation, sequence = request.reservation, request.sequence
        assert reservation is not None and sequence is not None and request.first_token is not None
        request.advance(PrefillEvent.SETTLED)
        self._account.close(sequence)
        self._transfer_health.note_success(reservation.peer)
        self.counters["finished"] += not reservation.message.is_self_test
        trace = request.trace(now)
        logprobs = [request.first_logprobs] if request.first_logprobs is not None else []
        self._outbox.to_peer(
            reservation.link,
            TransferDone(
                transfer_id=reservation.message.transfer_id,
                peer_incarnation=reservation.peer,
                token_count=len(request.token_ids),
                first_token=request.first_token,
                # Every rank settles; those with nothing that is cached there are no writers.
                writers=sorted(request.writers_settled.intersection(reservation.message.writers)),
                trace=_seen_by_target(request, trace.transfer),
                logprobs=logprobs,
                prompt_logprobs=request.prompt_logprobs,
                digests=request.digests,
            ),
        )
        if request.client_id is not None:
            self._outbox.to_frontend(
                Tokens(
                    request.client_id,
                    [request.first_token],
                    logprobs=logprobs,
                    cached_token_count=request.cached_token_count,
                    finish=FinishReason(FinishKind.LENGTH),
                    trace=trace,
                )
            )
        elif not reservation.message.is_self_test:
            self._outbox.to_frontend(Traced(trace))
        self._forget(request)

    def fail(self, request: PrefillRequest, failure: Failure, now: float) -> None:
        """Stop a request. First cause wins; a request that is ending already is left alone."""
        if request.state in ENDED:
            return
        request.failure = request.failure or failure
        failure = request.failure
        if request.client_id is not None:
            trace = request.trace(now)
            self._outbox.to_frontend(
                Failed(request.client_id, failure.status, failure.kind, failure.message, trace)
            )
        self._rendezvous.give_up(request, failure, now)
        self._table.queue.discard(request)
        if request.sequence is not None:
            self._batcher.stop(request.sequence)
            if request.reservation is not None:
                self._sender.cancel(request, request.reservation)
        request.advance(PrefillEvent.CANCELLED)
        self.finish_if_quiet(request, now)

    def finish_if_quiet(self, request: PrefillRequest, now: float) -> None:
        """End a failed request for good if no step and no put touches its pages any more."""
        sequence, failure, reservation = request.sequence, request.failure, request.reservation
        assert failure is not None
        if request.sends_open or (sequence is not None and self._batcher.is_in_flight(sequence)):
            return
        if sequence is not None:
            self._account.close(sequence)
            request.advance(PrefillEvent.SETTLED)
        kind = "bootstrap_failed" if failure.kind in BOOTSTRAP_FAILURES else failure.kind
        if kind in self.counters:
            self.counters[kind] += 1
        if failure.kind == "transfer_failed" and reservation is not None:
            self._transfer_health.note_failure(reservation.peer, now)
        if reservation is not None and request.is_quiet:
            if request.is_abort_asked:
                transfer_id = reservation.message.transfer_id
                self._outbox.to_peer(reservation.link, Quiesced(transfer_id, reservation.peer))
            else:
                self.reply_failed(reservation, failure)
        is_test = reservation is not None and reservation.message.is_self_test
        if request.client_id is None and not is_test:
            self._outbox.to_frontend(Traced(request.trace(now)))
        self._forget(request)

    def reply_failed(self, reservation: Reservation, failure: Failure) -> None:
        """The terminal message of a transfer that brought nothing."""
        self._outbox.to_peer(
            reservation.link,
            TransferFailed(
                transfer_id=reservation.message.transfer_id,
                peer_incarnation=reservation.peer,
                kind=failure.kind,
                message=failure.message,
                status=failure.status,
                is_retryable=failure.is_retryable,
            ),
        )

    def _forget(self, request: PrefillRequest) -> None:
        self._sender.close(request)
        self._table.forget(request)
        if request.reservation is not None:
            self._peers.count_transfer(request.reservation.peer, -1)
            if request.uses_credit:
                self._credits.end(request.reservation.peer)


def _seen_by_target(request: PrefillRequest, trace: TransferTrace) -> TransferTrace:
    """What a decode server waited for: not for what was computed before it asked."""
    if not request.is_ahead:
        return trace
    return msgspec.structs.replace(
        trace, queue_s=0.0, prefill_s=0.0, chunk_count=0, chunk_ends_s=[]
    )
