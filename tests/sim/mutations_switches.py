"""Planted bugs of servers that take on the other role over the same workers."""

from __future__ import annotations

import pytest

from common.transfers.transfers import Transfers
from prefill_server.scheduler import PrefillScheduler
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def a_switch_says_that_all_is_quiet(patch: Patch) -> None:
    """Its workers are taken on by the other role without the fence of old connections."""
    patch.setattr(Transfers, "is_quiet", property(lambda self: True))


def the_other_role_begins_at_once(patch: Patch) -> None:
    """Pages of the old role are given out while a late write can come."""
    expire = PrefillScheduler._expire

    def expire_and_admit(self: PrefillScheduler, now: float) -> None:
        expire(self, now)
        self._admit(now)

    patch.setattr(PrefillScheduler, "_expire", expire_and_admit)


def nobody_waits_for_the_last_answers(patch: Patch) -> None:
    """What was asked just before the last words is answered by nobody."""
    patch.setattr(Transfers, "has_peers", property(lambda self: False))


MUTATIONS = (
    Mutation("a-switch-says-that-all-is-quiet", a_switch_says_that_all_is_quiet, 356),
    Mutation("the-other-role-begins-at-once", the_other_role_begins_at_once, 356),
    Mutation("nobody-waits-for-the-last-answers", nobody_waits_for_the_last_answers, 23),
)
