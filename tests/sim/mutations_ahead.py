"""Bugs of sending a step while another runs, planted into the real batcher.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.scheduling.batcher import Batcher, PlannedStep
from common.scheduling.in_flight import Flight
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from common.transfers.outgoing import Outgoing, OutgoingTransfer, PageLists
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def pages_come_back_with_the_first_step(patch: Patch) -> None:
    """Who left gives its pages back when any step returns, whatever the one behind it computes."""
    patch.setattr(Batcher, "_close_or_wait", lambda self, sequence: self._account.close(sequence))

    def remove(self: Batcher, sequence: Sequence) -> None:
        self.stop(sequence)
        if self.is_in_flight(sequence):
            self._leaving.append(sequence)
        else:
            self._account.close(sequence)

    patch.setattr(Batcher, "remove", remove)


def a_dropped_token_is_told(patch: Patch) -> None:
    """Whoever a step computed has a new token, even if the step before ended it."""

    def still_running(self: Batcher, flight: Flight, request_id: int) -> Sequence:
        return flight.sequences[request_id]

    patch.setattr(Batcher, "_still_running", still_running)


def pending_tokens_get_no_page(patch: Patch) -> None:
    """Room is made for the tokens that are known."""
    patch.setattr(Sequence, "token_count", property(lambda self: len(self.token_ids)))


def pending_tokens_count_as_computed(patch: Patch) -> None:
    """A window moves on with a step that is still in flight."""
    recycle = PageAccount.recycle

    def recycle_ahead(self: PageAccount, sequence: Sequence) -> None:
        sequence.computed_count += sequence.pending_count
        recycle(self, sequence)
        sequence.computed_count -= sequence.pending_count

    patch.setattr(PageAccount, "recycle", recycle_ahead)


def a_prefill_server_decodes_ahead(patch: Patch) -> None:
    """A prompt whose last chunk is in flight decodes next, although its cache is to leave as it
    is."""

    def decoding_ahead(self: Batcher) -> list[Sequence]:
        return [*self._running.values(), *(s for s in self._prompts.values() if s.pending_count)]

    patch.setattr(Batcher, "_decoding_ahead", decoding_ahead)


def a_chunk_is_sent_again(patch: Patch) -> None:
    """A prompt goes on behind what is computed, although its next chunk is in flight."""
    patch.setattr(Sequence, "chunk_start", property(lambda self: self.computed_count))


def a_chunk_leaves_with_the_step_before(patch: Patch) -> None:
    """A transfer waits for the step that runs, not for the one behind it that computes it."""
    send = Outgoing.send

    def send_early(
        self: Outgoing,
        transfer: OutgoingTransfer,
        pages: PageLists,
        token_stop: int,
        step_id: int,
        *,
        is_final: bool,
    ) -> None:
        send(self, transfer, pages, token_stop, step_id - 1, is_final=is_final)

    patch.setattr(Outgoing, "send", send_early)


def a_step_is_planned_as_if_alone(patch: Patch) -> None:
    """What decodes, needs pages or must go is decided without the step that is in flight."""

    def plan_step(self: Batcher) -> PlannedStep:
        planned = PlannedStep(None)
        if len(self._in_flight) < self.limits.in_flight_max:
            self._make_room(planned)
            decoding = list(self._running.values())
            planned.step = self._begin(self._plan_chunks(len(decoding)), decoding)
        return planned

    patch.setattr(Batcher, "plan_step", plan_step)


MUTATIONS = (
    Mutation("pages-back-with-the-first-step", pages_come_back_with_the_first_step, 14),
    Mutation("a-dropped-token-is-told", a_dropped_token_is_told, 0),
    Mutation("pending-tokens-get-no-page", pending_tokens_get_no_page, 0),
    Mutation("pending-tokens-count-as-computed", pending_tokens_count_as_computed, 1),
    Mutation("a-prefill-server-decodes-ahead", a_prefill_server_decodes_ahead, 1),
    Mutation("a-chunk-is-sent-again", a_chunk_is_sent_again, 0),
    Mutation("a-chunk-leaves-a-step-early", a_chunk_leaves_with_the_step_before, 5),
    Mutation("a-step-is-planned-as-if-alone", a_step_is_planned_as_if_alone, 0),
)
