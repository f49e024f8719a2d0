"""Bugs of what clients and peers are promised, planted into the real cores and the real codec.

What a message may carry and what it must say, when a request that waits is answered, and what a
room's other half hears. Knows nothing of stories.
"""

from __future__ import annotations

import msgspec
import pytest

from common.errors import ProtocolError
from common.protocol import codec
from common.protocol.frontend import SchedulerToFrontend, Tokens
from common.protocol.peer import DecodeToPrefill, TransferDone, TransferRequest, Withdraw
from common.scheduling.peers import Outbox
from common.scheduling.transitions import DecodeEvent
from decode_server.admission import Admission
from decode_server.arrivals import Arrivals
from decode_server.endings import Endings
from decode_server.prefill_peer import PrefillPeer
from decode_server.prefill_peers import PrefillPeers
from decode_server.recovery import PEER_LOOK_S, PEER_WAIT_S, Recovery
from decode_server.request import DecodeRequest, Transfer
from prefill_server.rendezvous import Rendezvous
from prefill_server.request import PrefillRequest, Reservation
from prefill_server.reservations import Reservations

Patch = pytest.MonkeyPatch


# ---- what a message carries ----------------------------------------------------------------------


def a_bound_that_only_its_reader_has(patch: Patch) -> None:
    """A prefill server reads prompts of fewer tokens than decode servers send."""
    decode = codec.decode_decode_to_prefill

    def decode_short(payload: bytes) -> DecodeToPrefill:
        message = decode(payload)
        if isinstance(message, TransferRequest) and len(message.token_ids) > 64:
            raise ProtocolError(f"{len(message.token_ids)} token ids: at most 64 are allowed")
        return message

    patch.setattr(codec, "decode_decode_to_prefill", decode_short)


def a_page_list_is_cut(patch: Patch) -> None:
    """A reservation names the pages of whole chunks only."""
    make = Admission._transfer_request

    def make_short(
        self: Admission, request: DecodeRequest, transfer: Transfer, attachment: int, now: float
    ) -> TransferRequest:
        message = make(self, request, transfer, attachment, now)
        pages = [(first, ids[:8]) for first, ids in message.pages]
        return msgspec.structs.replace(message, pages=pages)

    patch.setattr(Admission, "_transfer_request", make_short)


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
    adopt = Arrivals._adopt

    def adopt_silently(
        self: Arrivals, link: str, transfer: Transfer, done: TransferDone, now: float
    ) -> None:
        request = transfer.request
        is_second = request is not None and request.first_token_at > 0.0
        effects = self._endings._outbox._effects
        count = len(effects)
        adopt(self, link, transfer, done, now)
        if is_second and request is not None and request.sequence is not None:
            del effects[count:]

    patch.setattr(Arrivals, "_adopt", adopt_silently)


def fence_by_death_alone(patch: Patch) -> None:
    """What a process had sent before it died may still lie in a socket of ours."""
    patch.setattr(PrefillPeers, "note_gone", lambda self, incarnation: True)


def credits_are_not_looked_at(patch: Patch) -> None:
    """A decode server asks for more than the other one said it takes."""
    patch.setattr(PrefillPeer, "has_room", lambda self, open_count: not self.is_full)


# ---- when a request is answered ------------------------------------------------------------------


def the_wait_for_a_server_is_looked_at_once(patch: Patch) -> None:
    """Ten seconds after a request came, and never again."""
    end = Recovery._end_peerless

    def end_some(self: Recovery, now: float) -> None:
        due = {
            request.request_id
            for request in self._endings.requests.values()
            if 0.0 <= now - request.arrived_at - PEER_WAIT_S < 2 * PEER_LOOK_S
        }
        fail = self._endings.fail
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                self._endings,
                "fail",
                lambda request, *words: request.request_id in due and fail(request, *words),
            )
            end(self, now)

    patch.setattr(Recovery, "_end_peerless", end_some)


def the_wait_for_a_server_runs_from_arrival(patch: Patch) -> None:
    """Whoever has waited for pages is answered as soon as the last server is lost."""
    end = Recovery._end_peerless

    def end_early(self: Recovery, now: float) -> None:
        self._absent_since = dict.fromkeys(self._absent_since, 0.0)
        end(self, now)

    patch.setattr(Recovery, "_end_peerless", end_early)


def a_retry_begins_the_budget_anew(patch: Patch) -> None:
    wait_again = Endings.wait_again

    def wait_anew(self: Endings, request: DecodeRequest, event: DecodeEvent, now: float) -> None:
        request.deadline = now + request.deadline - request.arrived_at
        self.deadlines.forget(request.request_id)
        self.deadlines.add(request.request_id, request.deadline)
        wait_again(self, request, event, now)

    patch.setattr(Endings, "wait_again", wait_anew)


def a_retried_request_is_put_behind(patch: Patch) -> None:
    """Whoever lost its server waits behind all who have not begun."""
    wait_again = Endings.wait_again

    def wait_behind(self: Endings, request: DecodeRequest, event: DecodeEvent, now: float) -> None:
        wait_again(self, request, event, now)
        self.queue.discard(request.request_id)
        self.queue.add(request)

    patch.setattr(Endings, "wait_again", wait_behind)


# ---- what a room's other half hears --------------------------------------------------------------


def a_withdrawal_is_forgotten(patch: Patch) -> None:
    """A reservation that was given up leaves no memory of its room."""

    def drop(self: Rendezvous, room: int, *_: object) -> None:
        del self._rooms[room]

    patch.setattr(Rendezvous, "_drop_reservation", drop)


def a_waiting_half_is_not_told(patch: Patch) -> None:
    """That its decode half gave up is noted for one that comes later only."""

    def handle(self: Reservations, link: str, message: Withdraw, now: float) -> None:
        self.stale_count += 1

    patch.setattr(Reservations, "handle_withdraw", handle)


def an_expired_reservation_is_not_answered(patch: Patch) -> None:
    take_expired = Rendezvous.take_expired

    def take_requests(self: Rendezvous, now: float) -> list[PrefillRequest | Reservation]:
        halves = take_expired(self, now)
        return [half for half in halves if isinstance(half, PrefillRequest)]

    patch.setattr(Rendezvous, "take_expired", take_requests)
