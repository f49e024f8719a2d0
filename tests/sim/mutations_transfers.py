"""Bugs of transfers and of replies: what is believed, repeated, lost or said twice.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.failures import Failure
from common.protocol.frontend import Cancel, Failed, FrontendToScheduler
from common.protocol.peer import PeerMessage, TransferDone, TransferFailed
from common.scheduling.deadlines import Deadlines
from common.scheduling.events import Effect, ToFrontend
from common.scheduling.peers import Outbox
from common.scheduling.transitions import DecodeState, PrefillState
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import CacheFailed, IncomingResult
from common.transfers.outgoing import Outgoing
from common.transfers.transfers import TransferEvent, Transfers
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from decode_server.scheduler import DecodeScheduler
from prefill_server.request import PrefillRequest
from prefill_server.scheduler import PrefillScheduler
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


# ---- transfers ----------------------------------------------------------------------------------


def adopts_an_unknown_transfer(patch: Patch) -> None:
    """A late TransferDone is taken for whichever transfer is open on its link."""
    handle = Incoming.handle_done

    def handle_any(self: Incoming, link: str, done: TransferDone) -> IncomingResult | None:
        on_link = [transfer for transfer in self.under_way if transfer.link == link]
        if on_link and self.get(done.transfer_id) not in on_link:
            transfer = on_link[0]
            done = TransferDone(
                transfer_id=transfer.transfer_id,
                peer_incarnation=done.peer_incarnation,
                token_count=transfer.token_count,
                first_token=done.first_token,
                writers=list(transfer.writers),
                trace=done.trace,
            )
        return handle(self, link, done)

    patch.setattr(Incoming, "handle_done", handle_any)


def done_before_the_flush(patch: Patch) -> None:
    """TransferDone goes out with the first token, whatever is still on its way."""

    def handle_progress(self: PrefillScheduler, request: PrefillRequest, now: float) -> None:
        if request.state is PrefillState.DRAINING:
            self.requests.settle(request, now)
        elif request.state is PrefillState.SENDING and request.transfer is not None:
            for send_id in list(request.transfer.sends_open):
                del self.transfers.outgoing._of_send[send_id]
            request.transfer.sends_open.clear()
            request.transfer.digests_open.clear()
            request.transfer.settled_ranks.update(range(self._facts.rank_count))
            self.requests.finish(request, now)

    patch.setattr(PrefillScheduler, "_handle_progress", handle_progress)


def lost_abort_is_not_repeated(patch: Patch) -> None:
    patch.setattr(Incoming, "repeat_aborts", lambda self, now: None)


def lost_peer_forgets_its_requests(patch: Patch) -> None:
    """The pages of a lost peer are set aside, but nobody takes care of the requests."""
    abandon = Incoming.abandon_peer

    def abandon_only(self: Incoming, incarnation: str) -> list[CacheFailed]:
        abandon(self, incarnation)
        return []

    patch.setattr(Incoming, "abandon_peer", abandon_only)


def a_transfer_is_begun_again(patch: Patch) -> None:
    """A request for a transfer that comes twice, or after its own Abort, is taken for a new one."""

    def note(self: Outgoing, link: str, transfer_id: int) -> bool:
        return self.get(transfer_id) is None

    patch.setattr(Outgoing, "_note", note)


# ---- replies -------------------------------------------------------------------------------------


def lost_reply(patch: Patch) -> None:
    """A request that fails in a transfer is not answered."""
    fail = Requests.fail

    def fail_silently(self: Requests, request: DecodeRequest, failure: Failure, now: float) -> None:
        is_in_transfer = request.state is DecodeState.TRANSFERRING
        before = len(self._outbox._effects)
        fail(self, request, failure, now)
        if is_in_transfer:
            self._outbox._effects[before:] = [
                effect
                for effect in self._outbox._effects[before:]
                if not (isinstance(effect, ToFrontend) and isinstance(effect.message, Failed))
            ]

    patch.setattr(Requests, "fail", fail_silently)


def double_answer(patch: Patch) -> None:
    """Who cancels a request that has ended is answered once more."""
    handle = DecodeScheduler._handle_frontend

    def handle_twice(self: DecodeScheduler, message: FrontendToScheduler, now: float) -> None:
        if isinstance(message, Cancel) and self.requests.get(message.request_id) is None:
            self._outbox.to_frontend(Failed(message.request_id, 499, "aborted", "late"))
        handle(self, message, now)

    patch.setattr(DecodeScheduler, "_handle_frontend", handle_twice)


def deadline_ignored(patch: Patch) -> None:
    patch.setattr(Deadlines, "take_expired", lambda self, now: [])


def drain_drops_its_last_message(patch: Patch) -> None:
    """An outbox that is full to four effects loses the last."""
    take = Outbox.take

    def take_some(self: Outbox) -> list[Effect]:
        effects = take(self)
        return effects[:-1] if len(effects) == 4 else effects

    patch.setattr(Outbox, "take", take_some)


def failure_lost_on_the_way(patch: Patch) -> None:
    """A TransferFailed is dropped by who gets it; only the request's deadline is left."""
    handle = Transfers.handle_peer

    def handle_others(
        self: Transfers, link: str, message: PeerMessage, now: float
    ) -> list[TransferEvent]:
        return [] if isinstance(message, TransferFailed) else handle(self, link, message, now)

    patch.setattr(Transfers, "handle_peer", handle_others)


MUTATIONS = (
    Mutation("adopts-an-unknown-transfer", adopts_an_unknown_transfer, 84),
    Mutation("a-transfer-is-begun-again", a_transfer_is_begun_again, 179),
    Mutation("done-before-the-flush", done_before_the_flush, 0),
    Mutation("lost-abort-is-not-repeated", lost_abort_is_not_repeated, 20),
    Mutation("lost-peer-forgets-its-requests", lost_peer_forgets_its_requests, 0),
    Mutation("lost-reply", lost_reply, 1),
    Mutation("double-answer", double_answer, 1),
    Mutation("deadline-ignored", deadline_ignored, 1),
    Mutation("drain-drops-its-last-message", drain_drops_its_last_message, 0),
    Mutation("failure-lost-on-the-way", failure_lost_on_the_way, 4),
)
