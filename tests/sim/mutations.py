"""Bugs that are planted into the real cores, to see that the stories find them.

Each is a small change of one method, of a kind that is easily written by mistake. Knows nothing of
stories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from common.config import TransferMode
from common.failures import Failure
from common.protocol.frontend import Cancel, Failed, FrontendToScheduler
from common.protocol.peer import Abort, PeerMessage, Quiesced, TransferDone, TransferFailed
from common.protocol.worker import SendSettled
from common.scheduling.batcher import Batcher
from common.scheduling.deadlines import Deadlines
from common.scheduling.events import Effect, ToFrontend
from common.scheduling.page_account import PageAccount
from common.scheduling.page_pool import PagePool
from common.scheduling.peers import Outbox
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import DecodeState, PrefillState
from common.transfers.connection import Connection
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import CacheFailed, IncomingResult, IncomingTransfer
from common.transfers.outgoing import Outgoing, OutgoingTransfer
from common.transfers.transfers import TransferEvent, Transfers, WorkerReport
from common.transport import fences
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from decode_server.scheduler import DecodeScheduler
from prefill_server.request import PrefillRequest
from prefill_server.scheduler import PrefillScheduler
from tests.sim import mutations_ahead as ahead
from tests.sim import mutations_prefixes as prefixes
from tests.sim import mutations_promised as promised
from tests.sim import mutations_shared as shared
from tests.sim import mutations_told as told

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """found_by: a seed whose story fails with it, as long as nothing else changes."""

    name: str
    plant: Plant
    found_by: int


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
    Mutation("no-quarantine", no_quarantine, 2),
    Mutation("quarantine-by-timer", quarantine_by_timer, 12),
    Mutation("fence-by-closing-over-shm", fence_by_closing_over_shared_memory, 59),
    Mutation("quiesced-before-the-puts-are-back", quiesced_before_the_puts_are_back, 4),
    Mutation("word-of-a-broken-connection", word_of_a_broken_connection, 30),
    Mutation("abort-says-closed-too-early", abort_says_closed_too_early, 30),
    Mutation("a-device-copy-counts-as-the-networks", a_device_copy_counts_as_the_networks, 59),
    Mutation("stale-incarnation-speaks", stale_incarnation_speaks, 301),
    Mutation("done-frees-another-transfer", done_frees_another_transfer, 4),
    Mutation("slot-not-forgotten", slot_not_forgotten, 2),
    Mutation("adopts-an-unknown-transfer", adopts_an_unknown_transfer, 35),
    Mutation("a-transfer-is-begun-again", a_transfer_is_begun_again, 46),
    Mutation("done-before-the-flush", done_before_the_flush, 0),
    Mutation("lost-abort-is-not-repeated", lost_abort_is_not_repeated, 32),
    Mutation("lost-peer-forgets-its-requests", lost_peer_forgets_its_requests, 0),
    Mutation("lost-reply", lost_reply, 0),
    Mutation("double-answer", double_answer, 0),
    Mutation("deadline-ignored", deadline_ignored, 0),
    Mutation("drain-drops-its-last-message", drain_drops_its_last_message, 0),
    Mutation("failure-lost-on-the-way", failure_lost_on_the_way, 0),
    Mutation("window-page-one-token-early", window_page_one_token_early, 0),
    Mutation("pages-of-a-running-step-are-free", pages_of_a_running_step_are_free, 0),
    Mutation("broken-connection-loses-nothing", broken_connection_loses_nothing, 2),
    Mutation("wrong-page-released", wrong_page_released, 0),
    Mutation("retracted-request-loses-a-token", retracted_request_loses_a_token, 20),
    Mutation("retracted-request-keeps-its-pages", retracted_request_keeps_its_pages, 0),
    Mutation("pages-back-with-the-first-step", ahead.pages_come_back_with_the_first_step, 0),
    Mutation("a-dropped-token-is-told", ahead.a_dropped_token_is_told, 0),
    Mutation("pending-tokens-get-no-page", ahead.pending_tokens_get_no_page, 0),
    Mutation("pending-tokens-count-as-computed", ahead.pending_tokens_count_as_computed, 0),
    Mutation("a-prefill-server-decodes-ahead", ahead.a_prefill_server_decodes_ahead, 1),
    Mutation("a-chunk-is-sent-again", ahead.a_chunk_is_sent_again, 0),
    Mutation("a-chunk-leaves-a-step-early", ahead.a_chunk_leaves_with_the_step_before, 5),
    Mutation("a-step-is-planned-as-if-alone", ahead.a_step_is_planned_as_if_alone, 0),
    Mutation("only-the-newest-output-waits", told.only_the_newest_waits, 5),
    Mutation("a-failure-overtakes-output", told.a_failure_overtakes, 3),
    Mutation("a-bound-that-only-its-reader-has", promised.a_bound_that_only_its_reader_has, 0),
    Mutation("a-page-list-is-cut", promised.a_page_list_is_cut, 0),
    Mutation("last-of-much-output-dropped", promised.the_last_of_much_output_is_dropped, 2),
    Mutation("second-transfer-s-token-untold", promised.a_second_transfer_s_token_is_not_told, 20),
    Mutation("fence-by-death-alone", promised.fence_by_death_alone, 40),
    Mutation("peer-wait-is-looked-at-once", promised.the_wait_for_a_server_is_looked_at_once, 10),
    Mutation("peer-wait-runs-from-arrival", promised.the_wait_for_a_server_runs_from_arrival, 10),
    Mutation("a-retry-begins-the-budget-anew", promised.a_retry_begins_the_budget_anew, 47),
    Mutation("a-retried-request-is-put-behind", promised.a_retried_request_is_put_behind, 0),
    Mutation("credits-are-not-looked-at", promised.credits_are_not_looked_at, 0),
    Mutation("a-withdrawal-is-forgotten", promised.a_withdrawal_is_forgotten, 6),
    Mutation("a-waiting-half-is-not-told", promised.a_waiting_half_is_not_told, 6),
    Mutation(
        "an-expired-reservation-is-unanswered", promised.an_expired_reservation_is_not_answered, 4
    ),
    Mutation("pages-of-a-transfer-are-kept", shared.pages_of_a_transfer_are_kept, 0),
    Mutation("windows-of-the-first-chunk-leave", shared.windows_of_the_first_chunk_leave, 0),
    Mutation("closed-with-its-last-send", shared.a_transfer_is_closed_with_its_last_send, 0),
    Mutation("a-copy-is-forgotten", prefixes.a_copy_is_forgotten, 0),
    Mutation("a-copy-comes-back-twice", prefixes.a_copy_comes_back_twice, 0),
    Mutation("a-match-is-not-held", prefixes.a_match_is_not_held, 0),
    Mutation("what-was-held-is-kept-for-good", prefixes.what_was_held_is_kept_for_good, 0),
    Mutation(
        "blocks-are-found-before-their-chunk-returned",
        prefixes.blocks_are_found_before_their_chunk_returned,
        0,
    ),
    Mutation("a-checkpoint-is-of-one-token-more", prefixes.a_checkpoint_is_of_one_token_more, 0),
    Mutation(
        "the-rest-of-a-checkpoint-is-not-compared",
        prefixes.the_rest_of_a_checkpoint_is_not_compared,
        0,
    ),
    Mutation(
        "a-prefix-is-matched-without-its-checkpoint",
        prefixes.a_prefix_is_matched_without_its_checkpoint,
        0,
    ),
    Mutation("a-checkpoint-is-not-copied", prefixes.a_checkpoint_is_not_copied, 0),
    Mutation(
        "a-checkpoint-is-evicted-while-it-is-copied",
        prefixes.a_checkpoint_is_evicted_while_it_is_copied,
        0,
    ),
    Mutation("a-checkpoint-is-made-of-nothing", prefixes.a_checkpoint_is_made_of_nothing, 0),
    Mutation("the-salt-is-ignored", prefixes.the_salt_is_ignored, 0),
    Mutation(
        "what-is-found-in-part-is-sent-at-once", prefixes.what_is_found_in_part_is_sent_at_once, 0
    ),
    Mutation(
        "pages-behind-a-prefix-are-counted-from-its-beginning",
        prefixes.pages_behind_a_prefix_are_counted_from_its_beginning,
        0,
    ),
    Mutation(
        "a-slot-of-a-leaving-sequence-is-a-token-older-than-told",
        prefixes.a_slot_of_a_leaving_sequence_is_a_token_older_than_told,
        0,
    ),
    Mutation(
        "tokens-here-are-counted-as-prompt-tokens-more",
        prefixes.tokens_here_are_counted_as_prompt_tokens_more,
        0,
    ),
)
