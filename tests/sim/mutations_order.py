"""Bugs of the order in which requests wait, planted into the real queue and account.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.scheduling.fair_share import FairShare
from common.scheduling.waiting_queue import WaitingQueue
from decode_server.request import DecodeRequest
from prefill_server.admission import Admission as PrefillAdmission
from prefill_server.request import PrefillRequest
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def priority_is_ignored(patch: Patch) -> None:
    """All levels are looked at from the least urgent on."""
    add_in_order = WaitingQueue._add

    def add(self: WaitingQueue[DecodeRequest], request: DecodeRequest, *, is_new: bool) -> None:
        add_in_order(self, request, is_new=is_new)
        self._priorities.sort(reverse=True)

    patch.setattr(WaitingQueue, "_add", add)


def a_counter_is_never_lifted(patch: Patch) -> None:
    """A client that was idle has all of that time to its credit."""

    def begin_waiting(self: FairShare, client: str) -> None:
        self._served.setdefault(client, 0)
        self._waiting[client] += 1

    patch.setattr(FairShare, "begin_waiting", begin_waiting)


def nobody_is_charged(patch: Patch) -> None:
    """Clients are next by their first arrival."""
    patch.setattr(FairShare, "charge", lambda self, client, token_count, cost=1: None)


def output_is_not_charged(patch: Patch) -> None:
    charge = FairShare.charge

    def charge_prompts(self: FairShare, client: str, token_count: int, cost: int = 1) -> None:
        if cost == 1:
            charge(self, client, token_count)

    patch.setattr(FairShare, "charge", charge_prompts)


def a_prefill_server_looks_at_the_oldest(patch: Patch) -> None:
    """Whoever it is of, and however urgent."""

    def next_of(self: PrefillAdmission, now: float) -> PrefillRequest | None:
        queue = self._requests.queue
        for request in queue:
            has_room = self._batcher.has_room_for(len(request.token_ids))
            is_ready = request.request_id not in queue._aside
            if is_ready and has_room and not self._is_short(request):
                return request
        return None

    patch.setattr(PrefillAdmission, "_next", next_of)


MUTATIONS = (
    Mutation("priority-is-ignored", priority_is_ignored, 0),
    Mutation("a-counter-is-never-lifted", a_counter_is_never_lifted, 0),
    Mutation("nobody-is-charged", nobody_is_charged, 0),
    Mutation("output-is-not-charged", output_is_not_charged, 0),
    Mutation("a-prefill-server-looks-at-the-oldest", a_prefill_server_looks_at_the_oldest, 0),
)
