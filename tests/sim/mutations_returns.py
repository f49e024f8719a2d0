"""Bugs of caches that go back, planted into the real scheduler cores.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.failures import Failure, FailureKind
from common.scheduling.cached_sequences import CachedSequences, LentCache
from common.scheduling.prefix_cache import Match
from common.transfers.incoming_transfer import CacheFailed
from common.transfers.outgoing import CacheAsked
from common.transfers.transfers import AbortAsked, SendProgressed, TargetLost
from decode_server.returns import Returns as Lender
from prefill_server.returns import Returns
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def what_is_lent_can_be_evicted(patch: Patch) -> None:
    """Its blocks are read for the whole transfer, and nobody says so."""
    lend = CachedSequences.lend

    def lend_unlocked(self: CachedSequences, match: Match) -> LentCache | None:
        lent = lend(self, match)
        if lent is not None and self.cache is not None:
            self.cache.unlock(lent.node)
        return lent

    def take_back(self: CachedSequences, lent: LentCache) -> None:
        if lent.checkpoint is not None and self.cache is not None:
            self.cache.let_go(lent.checkpoint)

    patch.setattr(CachedSequences, "lend", lend_unlocked)
    patch.setattr(CachedSequences, "take_back", take_back)


def what_is_held_of_a_lost_return_is_kept(patch: Patch) -> None:
    def forget(self: Returns, failed: CacheFailed) -> None:
        del self._under_way[failed.owner]

    patch.setattr(Returns, "handle_failed", forget)


def what_was_lent_is_never_taken_back(patch: Patch) -> None:
    patch.setattr(CachedSequences, "take_back", lambda self, lent: None)


def what_has_ended_ends_again_with_its_peer(patch: Patch) -> None:
    """Its last report says that the connection broke, so the peer is lost by the same report."""
    apply = Lender.apply

    def apply_to_all(
        self: Lender, event: CacheAsked | SendProgressed | AbortAsked | TargetLost, now: float
    ) -> None:
        if not isinstance(event, TargetLost):
            apply(self, event, now)
            return
        for transfer in event.transfers:
            self._stop(transfer, Failure(FailureKind.PEER_LOST, event.reason), now)

    patch.setattr(Lender, "apply", apply_to_all)


MUTATIONS = (
    Mutation("what-is-lent-can-be-evicted", what_is_lent_can_be_evicted, 17),
    Mutation("what-is-held-of-a-lost-return-is-kept", what_is_held_of_a_lost_return_is_kept, 10),
    Mutation("what-was-lent-is-never-taken-back", what_was_lent_is_never_taken_back, 10),
    Mutation("what-has-ended-ends-again", what_has_ended_ends_again_with_its_peer, 56),
)
