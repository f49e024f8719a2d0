"""Where a request and the decode server that asks for its cache meet, by room or at once.

    client's half -> room <- decode server's half      routed: one body for both servers
    client -> computed -> held under its room <- asked   computed ahead
    asked, with its tokens                               a decode server's own client

Checks what comes, and refuses it or has it queued. Knows nothing of pages and steps.
"""

from __future__ import annotations

from common.failures import Failure, FailureKind
from common.protocol.frontend import Failed, Submit
from common.protocol.peer import VERSION_OF_SHARED_ROOMS
from common.request_bounds import N_MAX
from common.scheduling.peers import Outbox
from common.scheduling.transitions import PrefillState
from common.transfers.credits import Credits
from common.transfers.outgoing import Outgoing, OutgoingTransfer
from prefill_server.rendezvous import NEVER_CAME, Rendezvous
from prefill_server.request import PrefillRequest
from prefill_server.requests import Requests


class Meetings:
    """is_draining: nothing new is taken. count: requests that clients sent, refused ones included.

    rendezvous: the rooms in which halves wait.
    """

    def __init__(
        self,
        requests: Requests,
        outgoing: Outgoing,
        credits: Credits,
        outbox: Outbox,
        *,
        request_token_max: int,
        queue_max: int,
        room_timeout_s: float,
    ) -> None:
        self._requests = requests
        self._outgoing = outgoing
        self._credits = credits
        self._outbox = outbox
        self._request_token_max = request_token_max
        self._queue_max = queue_max
        self.rendezvous = Rendezvous(room_timeout_s)
        self.is_draining = False
        self.count = 0

    # ---- a client's half -------------------------------------------------------------------------

    def handle_submit(self, submit: Submit, now: float) -> None:
        self.count += len(submit.samples)
        room = submit.bootstrap.room if submit.bootstrap is not None else None
        failure = self._check(submit, room)
        if failure is not None:
            self._refuse(submit, failure)
            # A reservation of its room would wait in vain, unless that is another request's.
            if room is not None and self._requests.of_room(room) is None:
                self._refuse_room(room, failure.message, now)
            return
        assert room is not None, "checked"
        withdrawn = self.rendezvous.take_withdrawn(room, now)
        if withdrawn is not None:
            self._refuse(submit, withdrawn)
            return
        is_ahead = bool(submit.bootstrap and submit.bootstrap.engine)
        request = self._requests.submit(submit, room, now, is_ahead=is_ahead)
        if is_ahead:
            self._requests.queue_ahead(request, now)
        else:
            self.offer(request, now)

    def _check(self, submit: Submit, room: int | None) -> Failure | None:
        """Why a request is not taken; None if it is."""
        token_count, kind = len(submit.token_ids), FailureKind.BAD_REQUEST
        if room is None:
            return Failure(kind, "a prefill server needs bootstrap_room in the request")
        if self._requests.of_room(room) is not None:
            return Failure(kind, f"bootstrap_room={room}: already in use")
        if not 1 <= token_count <= self._request_token_max:
            limit = f"must be 1..{self._request_token_max}"
            return Failure(kind, f"prompt of {token_count} tokens: {limit}")
        if len(self._requests) >= self._queue_max:
            text = f"queue full: {len(self._requests)} requests"
            return Failure(FailureKind.QUEUE_FULL, text)
        return None

    def _refuse(self, submit: Submit, failure: Failure) -> None:
        for sample in submit.samples:
            self._outbox.to_frontend(Failed.of(sample.request_id, failure))

    def _refuse_room(self, room: int, problem: str, now: float) -> None:
        """The client's half of a room was not taken: its reservation ends, now or when it comes."""
        text = f"the prefill server refused the other half: {problem}"
        failure = Failure(FailureKind.OTHER_HALF_ABORTED, text)
        reservation = self.rendezvous.refuse(room, failure, now)
        if reservation is not None:
            self._outgoing.refuse(reservation, failure, now)

    def offer(self, request: PrefillRequest, now: float) -> None:
        """A request waits in its room, or meets the reservation that is there already."""
        assert request.room is not None
        reservation = self.rendezvous.offer(request.room, request, now)
        if reservation is not None:
            self._split_for(request, reservation, now)
            self._pair(request, reservation, now)

    # ---- a decode server's half ------------------------------------------------------------------

    def handle_asked(self, transfer: OutgoingTransfer, now: float) -> None:
        """A decode server has reserved pages for a cache."""
        message = transfer.request
        if self.is_draining and not message.is_held:
            text = "the prefill server is stopping"
            failure = Failure(FailureKind.STOPPING, text, is_retryable=True)
            self._refuse_asked(transfer, failure, now)
        elif message.room is not None:
            self._meet(message.room, transfer, now)
        elif len(self._requests) >= self._queue_max:
            text = f"queue full: {len(self._requests)} requests"
            self._credits.note_refused(transfer.peer)
            failure = Failure(FailureKind.QUEUE_FULL, text, is_retryable=True)
            self._refuse_asked(transfer, failure, now)
        else:
            self._pair(self._requests.submit_asked(transfer, now), transfer, now)

    def _refuse_asked(self, transfer: OutgoingTransfer, failure: Failure, now: float) -> None:
        self._outgoing.refuse(transfer, failure, now)
        self.note_refused(transfer.room, failure, now)

    def note_refused(self, room: int | None, failure: Failure, now: float) -> None:
        """A reservation was answered that it is not taken: the request of its room ends as well."""
        if room is not None:
            self.withdraw_room(room, f"its reservation was refused: {failure.message}", now)

    def withdraw_room(self, room: int, text: str, now: float) -> None:
        """No reservation comes for a room: its request ends, now or when it comes."""
        failure = Failure(FailureKind.OTHER_HALF_ABORTED, text)
        request = self.rendezvous.withdraw(room, failure, now)
        if request is not None:
            self.fail(request, failure, now)

    def _meet(self, room: int, transfer: OutgoingTransfer, now: float) -> None:
        if transfer.version < VERSION_OF_SHARED_ROOMS:
            rooms = range(room, room - N_MAX, -1)
            waiting = (self.rendezvous.waits_in(one) for one in rooms)
            request = next((one for one in waiting if one is not None), None)
            if request is not None:
                self._split_for(request, transfer, now)
        failure = self._why_not_met(room, transfer, now)
        if failure is not None:
            self._outgoing.refuse(transfer, failure, now)
            return
        waiting_count = self.rendezvous.reservation_count
        if waiting_count >= self._queue_max and self.rendezvous.waits_in(room) is None:
            text = f"queue full: {waiting_count} reservations wait for their requests"
            self._refuse_asked(transfer, Failure(FailureKind.QUEUE_FULL, text), now)
            return
        request = self.rendezvous.reserve(room, transfer, now)
        if request is not None:
            self._pair(request, transfer, now)

    def _split_for(self, request: PrefillRequest, transfer: OutgoingTransfer, now: float) -> None:
        """A decode server of the first release asks for each sample in a room of its own. Rooms of
        two bodies are far from each other, as routers draw them."""
        is_whole = transfer.version >= VERSION_OF_SHARED_ROOMS or len(request.seeds) == 1
        if is_whole or request.state is not PrefillState.WAITING:
            return  # a prompt that is computed already is nobody else's
        for part in self._requests.split(request):
            self.offer(part, now)
        if not request.clients:
            text = "the client of the first sample has gone"
            self.fail(request, Failure(FailureKind.OTHER_HALF_ABORTED, text), now)

    def _why_not_met(self, room: int, transfer: OutgoingTransfer, now: float) -> Failure | None:
        if self.rendezvous.holds_reservation(room):
            text = f"bootstrap_room={room}: already reserved by another request"
            return Failure(FailureKind.BAD_RESERVATION, text)
        given_up = self.rendezvous.why_given_up(room, now)
        if given_up is not None:
            return given_up
        if transfer.request.is_held:
            request = self._requests.of_room(room)
            if request is None or not request.is_ahead:
                text = f"no cache is held under room {room}"
                return Failure(FailureKind.NOT_HELD, text, is_retryable=True)
        return None

    def _pair(self, request: PrefillRequest, transfer: OutgoingTransfer, now: float) -> None:
        if transfer.token_count == len(request.token_ids):
            self._requests.pair(request, transfer, now)
            return
        text = (
            f"prompt of {len(request.token_ids)} tokens here, {transfer.token_count} on the "
            "decode server"
        )
        failure = Failure(FailureKind.PROMPT_MISMATCH, text)
        self._outgoing.refuse(transfer, failure, now)
        self.fail(request, failure, now)

    # ---- one half is given up --------------------------------------------------------------------

    def fail(self, request: PrefillRequest, failure: Failure, now: float) -> None:
        """End a request; a reservation that comes for it later hears of it at once."""
        is_ended = request.failure is not None
        self._requests.fail(request, failure, now)
        if not is_ended:
            self.rendezvous.give_up(request, failure, now)

    def drop(self, transfer: OutgoingTransfer, failure: Failure, now: float) -> None:
        """A reservation that waits in a room is given up."""
        self.rendezvous.drop(transfer, failure, now)
        self._outgoing.refuse(transfer, failure, now)

    def expire(self, now: float) -> None:
        """End halves whose other one never came."""
        for half in self.rendezvous.take_expired(now):
            if isinstance(half, PrefillRequest):
                self.fail(half, failure_of_expired(half), now)
            else:
                self._outgoing.refuse(half, NEVER_CAME, now)


def failure_of_expired(request: PrefillRequest) -> Failure:
    """The end of a half whose other one never came."""
    if request.is_ahead:
        text = "no decode server asked for the cache in time"
        return Failure(FailureKind.HOLD_EXPIRED, text)
    return NEVER_CAME
