"""Bugs of what clients and peers are promised, planted into the real cores and the real codec.

What a message may carry and what it must say, when a request that waits is answered, and what a
room's other half hears. Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from common.errors import ProtocolError
from common.protocol import codec
from common.protocol.frontend import SchedulerToFrontend, Tokens
from common.protocol.peer import PeerMessage, TransferRequest
from common.scheduling.peers import Outbox
from common.transfers.connection import Connection
from common.transfers.connections import Connections
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import Ask, CacheReady, IncomingTransfer
from common.transfers.outgoing import OutgoingTransfer
from decode_server.decisions import Fail
from decode_server.missing_servers import PEER_WAIT_S, REVIEW_INTERVAL_S, MissingServers
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from decode_server.scheduler import DecodeScheduler
from prefill_server.meetings import Meetings
from prefill_server.rendezvous import Rendezvous
from prefill_server.request import PrefillRequest
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


# ---- what a message carries ----------------------------------------------------------------------


def a_bound_that_only_its_reader_has(patch: Patch) -> None:
    """A prefill server reads prompts of fewer tokens than decode servers send."""
    decode = codec.decode_peer_message

    def decode_short(payload: bytes) -> PeerMessage:
        message = decode(payload)
        if isinstance(message, TransferRequest) and len(message.token_ids) > 64:
            raise ProtocolError(f"{len(message.token_ids)} token ids: at most 64 are allowed")
        return message

    patch.setattr(codec, "decode_peer_message", decode_short)


def a_page_list_is_cut(patch: Patch) -> None:
    """A reservation names the pages of whole chunks only."""
    make = Incoming._request

    def make_short(
        self: Incoming, transfer: IncomingTransfer, attachment: int, ask: Ask
    ) -> TransferRequest:
        message = make(self, transfer, attachment, ask)
        pages = [(first, ids[:8]) for first, ids in message.pages]
        return msgspec.structs.replace(message, pages=pages)

    patch.setattr(Incoming, "_request", make_short)


def the_last_of_much_output_is_dropped(patch: Patch) -> None:
    """As a socket does that is full: the end of an output is lost with its last token."""
    to_frontend = Outbox.to_frontend

    def to_full_socket(self: Outbox, message: SchedulerToFrontend) -> None:
        is_last = isinstance(message, Tokens) and message.finish is not None
        if not (is_last and len(self._effects) >= 2):
            to_frontend(self, message)

    patch.setattr(Outbox, "to_frontend", to_full_socket)


def a_second_transfer_s_token_is_not_told(patch: Patch) -> None:
    """A retracted request's next token comes with its transfer, and is taken for one it had."""
    handle = DecodeScheduler._handle_ready

    def handle_silently(self: DecodeScheduler, ready: CacheReady, now: float) -> None:
        request = self.requests.get(ready.owner)
        is_second = request is not None and request.first_token_at > 0.0
        effects = self._outbox._effects
        count = len(effects)
        handle(self, ready, now)
        if is_second and request is not None and request.sequence is not None:
            del effects[count:]

    patch.setattr(DecodeScheduler, "_handle_ready", handle_silently)


def fence_by_death_alone(patch: Patch) -> None:
    """What a process had sent before it died may still lie in a socket of ours."""
    patch.setattr(Connections, "note_gone", lambda self, incarnation: True)


def credits_are_not_looked_at(patch: Patch) -> None:
    """A decode server asks for more than the other one said it takes."""
    patch.setattr(Connection, "has_room", lambda self, open_count: not self.is_full)


# ---- when a request is answered ------------------------------------------------------------------


def the_wait_for_a_server_is_looked_at_once(patch: Patch) -> None:
    """Ten seconds after a request came, and never again."""
    find = MissingServers._without_server

    def find_some(self: MissingServers, now: float) -> Iterator[Fail]:
        for decision in find(self, now):
            late_s = now - decision.request.arrived_at - PEER_WAIT_S
            if 0.0 <= late_s < 2 * REVIEW_INTERVAL_S:
                yield decision

    patch.setattr(MissingServers, "_without_server", find_some)


def the_wait_for_a_server_runs_from_arrival(patch: Patch) -> None:
    """Whoever has waited for pages is answered as soon as the last server is lost."""
    find = MissingServers._without_server

    def find_early(self: MissingServers, now: float) -> Iterator[Fail]:
        self._absent_since = dict.fromkeys(self._absent_since, 0.0)
        return find(self, now)

    patch.setattr(MissingServers, "_without_server", find_early)


def a_retry_begins_the_budget_anew(patch: Patch) -> None:
    wait_again = Requests._wait_again

    def wait_anew(self: Requests, request: DecodeRequest, now: float) -> None:
        request.deadline = now + request.deadline - request.arrived_at
        self.deadlines.forget(request.request_id)
        self.deadlines.add(request.request_id, request.deadline)
        wait_again(self, request, now)

    patch.setattr(Requests, "_wait_again", wait_anew)


def a_retried_request_is_put_behind(patch: Patch) -> None:
    """Whoever lost its server waits behind all who have not begun."""
    wait_again = Requests._wait_again

    def wait_behind(self: Requests, request: DecodeRequest, now: float) -> None:
        wait_again(self, request, now)
        self.queue.discard(request)
        self.queue.add(request)

    patch.setattr(Requests, "_wait_again", wait_behind)


# ---- what a room's other half hears --------------------------------------------------------------


def a_withdrawal_is_forgotten(patch: Patch) -> None:
    """A reservation that was given up leaves no memory of its room."""

    def drop(self: Rendezvous, room: int, *_: object) -> None:
        del self._rooms[room]

    patch.setattr(Rendezvous, "_drop_reservation", drop)


def a_waiting_half_is_not_told(patch: Patch) -> None:
    """That its decode half gave up is noted for one that comes later only."""

    def withdraw(self: Meetings, room: int, text: str, now: float) -> None:
        pass

    patch.setattr(Meetings, "withdraw_room", withdraw)


def an_expired_reservation_is_not_answered(patch: Patch) -> None:
    take_expired = Rendezvous.take_expired

    def take_requests(self: Rendezvous, now: float) -> list[PrefillRequest | OutgoingTransfer]:
        halves = take_expired(self, now)
        return [half for half in halves if isinstance(half, PrefillRequest)]

    patch.setattr(Rendezvous, "take_expired", take_requests)


MUTATIONS = (
    Mutation("a-bound-that-only-its-reader-has", a_bound_that_only_its_reader_has, 0),
    Mutation("a-page-list-is-cut", a_page_list_is_cut, 0),
    Mutation("last-of-much-output-dropped", the_last_of_much_output_is_dropped, 1),
    Mutation("second-transfer-s-token-untold", a_second_transfer_s_token_is_not_told, 1),
    Mutation("fence-by-death-alone", fence_by_death_alone, 448),
    Mutation("peer-wait-is-looked-at-once", the_wait_for_a_server_is_looked_at_once, 65),
    Mutation("peer-wait-runs-from-arrival", the_wait_for_a_server_runs_from_arrival, 65),
    Mutation("a-retry-begins-the-budget-anew", a_retry_begins_the_budget_anew, 19),
    Mutation("a-retried-request-is-put-behind", a_retried_request_is_put_behind, 0),
    Mutation("credits-are-not-looked-at", credits_are_not_looked_at, 0),
    Mutation("a-withdrawal-is-forgotten", a_withdrawal_is_forgotten, 605),
    Mutation("a-waiting-half-is-not-told", a_waiting_half_is_not_told, 9),
    Mutation("an-expired-reservation-is-unanswered", an_expired_reservation_is_not_answered, 3),
)
