"""What decode servers ask for: reservations checked, paired with their requests, and given up.

Whatever is asked concerns only transfers of the peer and link that asks. Knows nothing of compute.
"""

from __future__ import annotations

from common.protocol.handshake import check_transfer_request
from common.protocol.peer import Abort, Quiesced, TransferFailed, TransferRequest, Withdraw
from common.scheduling.events import UnreadableRequest
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from common.scheduling.transitions import PrefillEvent
from prefill_server.credits import Credits
from prefill_server.decode_peers import DecodePeers
from prefill_server.endings import Endings
from prefill_server.holds import Holds
from prefill_server.rendezvous import Rendezvous
from prefill_server.request import Failure, PrefillRequest, Reservation
from prefill_server.requests import RequestTable
from prefill_server.sender import Sender

# Transfers that are not begun again, the last so many: what comes late was sent within seconds.
KNOWN_COUNT_MAX = 1 << 14


class Reservations:
    """Composed of the parts that hold something of a request.

    is_draining: nothing new is taken.
    stale_count: messages that were meant for another process, or came from one that has no say.
    """

    def __init__(
        self,
        facts: ServerFacts,
        table: RequestTable,
        rendezvous: Rendezvous,
        sender: Sender,
        peers: DecodePeers,
        credits: Credits,
        endings: Endings,
        holds: Holds,
        outbox: Outbox,
        *,
        request_token_max: int,
        queue_max: int,
    ) -> None:
        self._facts = facts
        self._table = table
        self._rendezvous = rendezvous
        self._sender = sender
        self._peers = peers
        self._credits = credits
        self._endings = endings
        self._holds = holds
        self._outbox = outbox
        self._request_token_max = request_token_max
        self._queue_max = queue_max
        self._known: dict[tuple[str, int], None] = {}
        self.stale_count = 0
        self.is_draining = False

    def handle(self, link: str, message: TransferRequest, now: float) -> None:
        is_new = self._note(link, message.transfer_id)
        peer = self._peers.connected(message.incarnation, link)
        if peer is None or message.peer_incarnation != self._facts.incarnation:
            self.stale_count += 1
            self._peers.detach_unknown(link, message.incarnation)
            return
        # One of an earlier attachment was on its way while the two lost each other and met anew.
        if not is_new or message.attachment != peer.attachment:
            self.stale_count += 1
            return
        reservation = Reservation(
            link, message.incarnation, message, peer.verify, peer.layout_bytes, peer.name
        )
        problem = check_transfer_request(self._facts.layout, peer.layout, peer.page_counts, message)
        if problem is None and message.token_count > self._request_token_max:
            problem = f"token_count={message.token_count}: at most {self._request_token_max} here"
        if problem is not None:
            self._refuse(reservation, Failure("bad_reservation", problem, 400), now)
        elif self.is_draining and not message.is_held:
            text = "the prefill server is stopping"
            self._refuse(reservation, Failure("stopping", text, 503, is_retryable=True), now)
        elif message.room is not None:
            self._meet(message.room, reservation, now, is_held=message.is_held)
        elif len(self._table) >= self._queue_max:
            text = f"queue full: {len(self._table)} requests"
            self._credits.note_refused(reservation.peer)
            self._refuse(reservation, Failure("queue_full", text, 503, is_retryable=True), now)
        else:
            assert message.sampling is not None, "checked with the reservation"
            request = self._table.add(
                client_id=None,
                token_ids=message.token_ids,
                prompt_count=message.prompt_count,
                sampling=message.sampling,
                budget_s=message.budget_ms / 1000,
                room=None,
                origin=message.origin,
                now=now,
            )
            self.pair(request, reservation, now)

    def refuse_unreadable(self, event: UnreadableRequest) -> None:
        """Answer a reservation that can't be read, so that its request does not wait in vain."""
        is_new = self._note(event.link, event.transfer_id)
        if self._peers.connected(event.incarnation, event.link) is None:
            self.stale_count += 1
            self._peers.detach_unknown(event.link, event.incarnation)
        elif not is_new:
            # What was begun under this id has an end of its own, and only that proves it quiet.
            self.stale_count += 1
        else:
            failed = TransferFailed(
                transfer_id=event.transfer_id,
                peer_incarnation=event.incarnation,
                kind="bad_reservation",
                message=event.problem,
                status=400,
                is_retryable=True,  # a server of another version may read it
            )
            self._outbox.to_peer(event.link, failed)

    def _note(self, link: str, transfer_id: int) -> bool:
        """Whether a transfer is new. Messages keep their order on a connection and no longer: one
        that comes again, or after its own Abort, has pages that may be somebody else's by now. So
        has one that first came while its peer was lost."""
        is_new = (link, transfer_id) not in self._known
        self._known[link, transfer_id] = None
        if len(self._known) > KNOWN_COUNT_MAX:
            del self._known[next(iter(self._known))]
        return is_new

    def handle_withdraw(self, link: str, message: Withdraw, now: float) -> None:
        """No reservation will come for a room."""
        if self._peers.connected(message.incarnation, link) is None:
            self.stale_count += 1
            return
        text = f"the decode server gave up before it had pages: {message.reason}"
        self._withdraw(message.room, text, now)

    def _withdraw(self, room: int, text: str, now: float) -> None:
        """No reservation comes for a room: its request ends, now or when it comes."""
        failure = Failure("other_half_aborted", text, 500)
        request = self._rendezvous.withdraw(room, failure, now)
        if request is not None:
            self._endings.fail(request, failure, now)

    def _refuse(self, reservation: Reservation, failure: Failure, now: float) -> None:
        """Answer a reservation that is not taken, and with it the request of its room."""
        self._endings.reply_failed(reservation, failure)
        room = reservation.message.room
        if room is not None:
            self._withdraw(room, f"its reservation was refused: {failure.message}", now)

    def _meet(self, room: int, reservation: Reservation, now: float, *, is_held: bool) -> None:
        if self._rendezvous.holds_reservation(room):
            text = f"bootstrap_room={room}: already reserved by another request"
            self._endings.reply_failed(reservation, Failure("bad_reservation", text, 400))
            return
        given_up = self._rendezvous.why_given_up(room, now)
        if given_up is None and is_held:
            given_up = self._holds.why_missing(room)
        if given_up is not None:
            self._endings.reply_failed(reservation, given_up)
            return
        waiting_count = self._rendezvous.reservation_count
        if waiting_count >= self._queue_max:
            text = f"queue full: {waiting_count} reservations wait for their requests"
            self._endings.reply_failed(reservation, Failure("queue_full", text, 503))
            return
        request = self._rendezvous.reserve(room, reservation, now)
        if request is not None:
            self.pair(request, reservation, now)

    def pair(self, request: PrefillRequest, reservation: Reservation, now: float) -> None:
        wanted = reservation.message.token_count
        if wanted != len(request.token_ids):
            text = f"prompt of {len(request.token_ids)} tokens here, {wanted} on the decode server"
            failure = Failure("prompt_mismatch", text, 400)
            self._endings.reply_failed(reservation, failure)
            self._endings.fail(request, failure, now)
            return
        self._table.attach(request, reservation, now)
        self._peers.count_transfer(reservation.peer, +1)
        if request.uses_credit:
            self._credits.begin(reservation.peer)
        request.advance(PrefillEvent.PAIRED)
        if request.is_ahead:
            request.paired_at = now
            self._sender.send_held(request)
            self._sender.ask_digests(request)
            return
        request.queued_at = now
        self._table.queue.add(request)

    def handle_abort(self, link: str, message: Abort, now: float) -> None:
        if message.peer_incarnation != self._facts.incarnation:
            self.stale_count += 1
            return
        request = self._table.of_transfer(message.transfer_id)
        # Whoever waits here did not give up; to a router an "aborted" would read as an answer.
        text = f"the decode server gave up: {message.reason}"
        failure = Failure("other_half_aborted", text, 500)
        if request is None:
            self._note(link, message.transfer_id)
            # A transfer whose connection broke with bytes under way has lost its peer. That peer
            # fences them before it says so, and before it attaches anew.
            is_connected = self._peers.connected(message.incarnation, link) is not None
            if not (message.is_closed or is_connected):
                return
            peer = message.incarnation
            self._rendezvous.withdraw_transfer(message.transfer_id, peer, link, failure, now)
            self._outbox.to_peer(link, Quiesced(message.transfer_id, peer))
            return
        reservation = request.reservation
        assert reservation is not None, "a transfer is known by its reservation"
        if (reservation.peer, reservation.link) != (message.incarnation, link):
            self.stale_count += 1
            return
        request.is_abort_asked = True
        if request.client_id is None:
            failure = Failure("aborted", text, 499)
        self._endings.fail(request, failure, now)

    def refuse_request(self, room: int, problem: str, now: float) -> None:
        """The client's half of a room was not taken: its reservation ends, now or when it comes."""
        text = f"the prefill server refused the other half: {problem}"
        failure = Failure("other_half_aborted", text, 500)
        reservation = self._rendezvous.refuse(room, failure, now)
        if reservation is not None:
            self._endings.reply_failed(reservation, failure)
