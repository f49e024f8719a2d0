"""Bugs of pages: given back while a writer may still reach them, or to the wrong place.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from common.config import TransferMode
from common.protocol.peer import Abort, Quiesced
from common.protocol.worker import SendSettled
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.scheduling.page_pool import PagePool
from common.scheduling.sequence import Sequence
from common.transfers.connection import Connection
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import IncomingTransfer
from common.transfers.outgoing import Outgoing, OutgoingTransfer
from common.transfers.transfers import TransferEvent, Transfers, WorkerReport
from common.transport import fences
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


# ---- pages that a writer may still reach ---------------------------------------------------------


def no_quarantine(patch: Patch) -> None:
    """Pages of a transfer that is given up are free at once."""
    set_aside = Incoming._set_aside

    def set_aside_nothing(self: Incoming, transfer: IncomingTransfer, *, is_quiet: bool) -> None:
        set_aside(self, transfer, is_quiet=is_quiet)
        pool = self._account.pool
        is_hidden = transfer.mode is TransferMode.STAGED
        for group, (_, pages) in enumerate(transfer.pages):
            (pool.release if is_hidden else pool.release_quarantined)(group, pages)
            transfer.spans[group].page_ids = []

    patch.setattr(Incoming, "_set_aside", set_aside_nothing)


def quarantine_by_timer(patch: Patch) -> None:
    """Whoever has not answered the second Abort is taken to be quiet."""
    repeat = Incoming.repeat_aborts

    def repeat_and_free(self: Incoming, now: float) -> None:
        is_due = now >= self._repeat_at
        repeat(self, now)
        for transfer_id in list(self._abandoned) if is_due else ():
            self._apply_quiet(transfer_id)

    patch.setattr(Incoming, "repeat_aborts", repeat_and_free)


def fence_by_closing_over_shared_memory(patch: Patch) -> None:
    patch.setattr(Connection, "is_fenced", property(lambda self: True))


def quiesced_before_the_puts_are_back(patch: Patch) -> None:
    handle = Outgoing.handle_abort

    def handle_early(self: Outgoing, link: str, message: Abort) -> OutgoingTransfer | None:
        self._outbox.to_peer(link, Quiesced(message.transfer_id, message.incarnation))
        return handle(self, link, message)

    patch.setattr(Outgoing, "handle_abort", handle_early)


def word_of_a_broken_connection(patch: Patch) -> None:
    """Sends that settled with bytes under way count as quiet."""
    handle_worker = Transfers.handle_worker

    def handle_as_quiet(self: Transfers, message: WorkerReport, now: float) -> list[TransferEvent]:
        if isinstance(message, SendSettled):
            message = msgspec.structs.replace(message, is_quiet=True)
        return handle_worker(self, message, now)

    patch.setattr(Transfers, "handle_worker", handle_as_quiet)


def abort_says_closed_too_early(patch: Patch) -> None:
    """The writer is told that its way in is closed, while our ranks still close it."""
    ask = Incoming._ask_to_stop

    def ask_early(self: Incoming, abandoned: object, reason: str) -> None:
        abandoned.is_closed = True  # type: ignore[attr-defined]
        ask(self, abandoned, reason)  # type: ignore[arg-type]

    patch.setattr(Incoming, "_ask_to_stop", ask_early)


def a_device_copy_counts_as_the_networks(patch: Patch) -> None:
    patch.setitem(fences.STORED_BY, "cuda_ipc", fences.StoredBy.TARGET)


def stale_incarnation_speaks(patch: Patch) -> None:
    """A restarted server answers for the transfers of its predecessor."""
    handle = Outgoing.handle_abort

    def handle_any(self: Outgoing, link: str, message: Abort) -> OutgoingTransfer | None:
        meant = Abort(
            message.transfer_id, message.incarnation, self._facts.incarnation, message.reason
        )
        return handle(self, link, meant)

    patch.setattr(Outgoing, "handle_abort", handle_any)


def done_frees_another_transfer(patch: Patch) -> None:
    """The terminal message of an abandoned transfer frees the oldest one instead."""

    def apply_quiet(self: Incoming, transfer_id: int) -> None:
        if transfer_id in self._abandoned:
            oldest = next(iter(self._abandoned.values()))
            oldest.is_quiet = True
            self._free_if_out_of_reach(oldest)

    patch.setattr(Incoming, "_apply_quiet", apply_quiet)


def slot_not_forgotten(patch: Patch) -> None:
    """Staged pieces may be scattered after the pages have gone to somebody else."""
    free = Incoming._free_if_out_of_reach

    def free_early(self: Incoming, abandoned: object) -> None:
        abandoned.is_forgotten = True  # type: ignore[attr-defined]
        free(self, abandoned)  # type: ignore[arg-type]

    patch.setattr(Incoming, "_free_if_out_of_reach", free_early)


# ---- pages and sequences -------------------------------------------------------------------------


def window_page_one_token_early(patch: Patch) -> None:
    recycle = PageAccount.recycle

    def recycle_early(self: PageAccount, sequence: Sequence) -> None:
        sequence.computed_count += 1
        recycle(self, sequence)
        sequence.computed_count -= 1

    patch.setattr(PageAccount, "recycle", recycle_early)


def pages_of_a_running_step_are_free(patch: Patch) -> None:
    """A cancelled request gives its pages back while a step still writes them."""
    patch.setattr(Batcher, "is_in_flight", lambda self, sequence: False)


def broken_connection_loses_nothing(patch: Patch) -> None:
    """Whoever is connected again is taken to have heard and said everything."""
    patch.setattr(Incoming, "is_asked", lambda self, incarnation: False)


def wrong_page_released(patch: Patch) -> None:
    """The page before the last is given back twice, the last one never."""
    release = PagePool.release

    def release_wrong(self: PagePool, group: int, pages: list[int]) -> None:
        pages = list(pages)
        if len(pages) > 2 and pages[-1] - 1 in self._used[group]:
            pages[-1] -= 1
        release(self, group, dict.fromkeys(pages))

    patch.setattr(PagePool, "release", release_wrong)


def retracted_request_loses_a_token(patch: Patch) -> None:
    """What was streamed last is not part of what is computed again."""
    retract = Requests.retract

    def forget_one(self: Requests, request: DecodeRequest, now: float) -> None:
        retract(self, request, now)
        request.token_ids = request.token_ids[:-1]

    patch.setattr(Requests, "retract", forget_one)


def retracted_request_keeps_its_pages(patch: Patch) -> None:
    make_room = Batcher._make_room

    def keep(self: Batcher, planned: object) -> None:
        close = self._account.close
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._account, "close", lambda sequence: _close_but_one(close, sequence))
            make_room(self, planned)  # type: ignore[arg-type]

    patch.setattr(Batcher, "_make_room", keep)


def _close_but_one(close: Callable[[Sequence], None], sequence: Sequence) -> None:
    if len(sequence.spans[0].page_ids) > sequence.block_count:
        sequence.spans[0].page_ids.pop()
        sequence.digests = b""
    close(sequence)


MUTATIONS = (
    Mutation("no-quarantine", no_quarantine, 7),
    Mutation("quarantine-by-timer", quarantine_by_timer, 18),
    Mutation("fence-by-closing-over-shm", fence_by_closing_over_shared_memory, 18),
    Mutation("quiesced-before-the-puts-are-back", quiesced_before_the_puts_are_back, 4),
    Mutation("word-of-a-broken-connection", word_of_a_broken_connection, 0),
    Mutation("abort-says-closed-too-early", abort_says_closed_too_early, 24),
    Mutation("a-device-copy-counts-as-the-networks", a_device_copy_counts_as_the_networks, 18),
    Mutation("stale-incarnation-speaks", stale_incarnation_speaks, 374),
    Mutation("done-frees-another-transfer", done_frees_another_transfer, 24),
    Mutation("slot-not-forgotten", slot_not_forgotten, 39),
    Mutation("window-page-one-token-early", window_page_one_token_early, 1),
    Mutation("pages-of-a-running-step-are-free", pages_of_a_running_step_are_free, 0),
    Mutation("broken-connection-loses-nothing", broken_connection_loses_nothing, 20),
    Mutation("wrong-page-released", wrong_page_released, 0),
    Mutation("retracted-request-loses-a-token", retracted_request_loses_a_token, 1),
    Mutation("retracted-request-keeps-its-pages", retracted_request_keeps_its_pages, 1),
)
