"""Turns chunks into Send messages and counts what has settled, digests included.

Knows nothing of clients; which bytes a Send means is the worker's to plan.
"""

from __future__ import annotations

from common.config import Verify
from common.layout.component import LiveKind
from common.planner.digests import add_digests
from common.protocol.digests import Digest, Digested
from common.protocol.worker import (
    CancelSends,
    CloseTransfer,
    OpenTransfer,
    PrefillChunk,
    Send,
    SendSettled,
)
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from prefill_server.request import Failure, PrefillRequest, Reservation

PageLists = list[tuple[int, list[int]]]

# The step of a Send that waits for none.
ALL_COMPUTED = 0


class Sender:
    """Sends of all requests that have any open."""

    def __init__(self, facts: ServerFacts, outbox: Outbox) -> None:
        self._rank_count = facts.rank_count
        self._is_window = [group.live.kind is LiveKind.WINDOW for group in facts.layout.groups]
        self._outbox = outbox
        self._requests: dict[int, PrefillRequest] = {}
        self._digesting: dict[int, PrefillRequest] = {}
        self._next_send_id = 1

    def send_chunk(self, request: PrefillRequest, chunk: PrefillChunk, step_id: int) -> None:
        """Transfer what a step makes final, as its layer groups are computed: one Send for all
        ranks. The first one also takes along what a cached prefix had ready."""
        self._send(request, chunk.stop, step_id, is_final=chunk.is_last)

    def send_held(self, request: PrefillRequest) -> None:
        """Transfer a cache that was computed before anybody asked for it: all in one Send."""
        self._send(request, len(request.token_ids), ALL_COMPUTED, is_final=True)

    def _send(
        self, request: PrefillRequest, token_stop: int, step_id: int, *, is_final: bool
    ) -> None:
        reservation, sequence = request.reservation, request.sequence
        assert reservation is not None and sequence is not None
        pages = sequence.page_lists()
        transfer_id = reservation.message.transfer_id
        if request.sent_token_count == 0:
            self._outbox.to_workers(
                OpenTransfer(
                    transfer_id=transfer_id,
                    peer=reservation.peer,
                    source_pages=_chosen(pages, [not found for found in self._is_window]),
                    target_pages=reservation.message.pages,
                )
            )
        send_id = self._next_send_id
        self._next_send_id += 1
        request.sends_open[send_id] = set(range(self._rank_count))
        self._requests[send_id] = request
        has_windows = is_final and any(self._is_window)
        self._outbox.to_workers(
            Send(
                send_id=send_id,
                step_id=step_id,
                transfer_id=transfer_id,
                token_start=request.sent_token_count,
                token_stop=token_stop,
                is_final=is_final,
                window_pages=_chosen(pages, self._is_window) if has_windows else [],
            )
        )
        request.sent_token_count = token_stop

    def close(self, request: PrefillRequest) -> None:
        """The request has ended: if workers know pages of it, they can forget them."""
        assert not request.sends_open
        if request.sent_token_count:
            assert request.reservation is not None
            self._outbox.to_workers(CloseTransfer(request.reservation.message.transfer_id))

    def cancel(self, request: PrefillRequest, reservation: Reservation) -> None:
        """Ask the workers to stop issuing puts; what is out still settles."""
        if request.sends_open:
            self._outbox.to_workers(CancelSends(reservation.message.transfer_id))

    def apply_settled(self, settled: SendSettled) -> PrefillRequest | None:
        """Count one rank's answer; the request it belongs to, None if nobody waits for it."""
        request = self._requests.get(settled.send_id)
        if request is None or settled.rank not in request.sends_open[settled.send_id]:
            return None
        ranks = request.sends_open[settled.send_id]
        ranks.remove(settled.rank)
        if not ranks:
            del request.sends_open[settled.send_id]
            del self._requests[settled.send_id]
        request.nbytes += settled.nbytes
        request.exposed_nbytes += settled.exposed_nbytes
        request.run_count += settled.run_count
        request.wire_s += settled.seconds
        request.writers_settled.add(settled.rank)
        request.is_quiet = request.is_quiet and settled.is_quiet
        if settled.error and request.failure is None:
            message = f"transfer from rank {settled.rank} failed: {settled.error}"
            request.failure = Failure("transfer_failed", message, 500, is_retryable=True)
        return request

    def ask_digests(self, request: PrefillRequest) -> None:
        """If they are wanted: the prompt is computed, and its pages hold what is sent."""
        reservation, sequence = request.reservation, request.sequence
        assert reservation is not None and sequence is not None
        if reservation.verify is Verify.OFF:
            return
        transfer_id = reservation.message.transfer_id
        request.digests_open = set(range(self._rank_count))
        self._digesting[transfer_id] = request
        self._outbox.to_workers(
            Digest(
                transfer_id=transfer_id,
                layout=reservation.layout,
                is_source=True,
                token_count=len(request.token_ids),
                pages=sequence.page_lists(),
                verify=reservation.verify,
            )
        )

    def apply_digested(self, digested: Digested) -> PrefillRequest | None:
        """Add one rank's digests; the request they belong to, None if nobody waits for them."""
        request = self._digesting.get(digested.transfer_id)
        if request is None or digested.rank not in request.digests_open:
            return None
        request.digests_open.remove(digested.rank)
        if not request.digests_open:
            del self._digesting[digested.transfer_id]
        known = request.digests
        request.digests = add_digests(known, digested.digests) if known else digested.digests
        return request

    @property
    def open_count(self) -> int:
        return len(self._requests)


def _chosen(pages: PageLists, is_chosen: list[bool]) -> PageLists:
    """Those of some groups; of the others none."""
    return [
        found if is_wanted else (0, []) for found, is_wanted in zip(pages, is_chosen, strict=True)
    ]
