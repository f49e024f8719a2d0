"""Planted bugs of schedulers that follow each other over the same workers."""

from __future__ import annotations

import pytest

from common.protocol.peer import Hello, Welcome
from common.transfers.transfers import TransferEvent, Transfers
from common.transfers.writers import Writers
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def nobody_is_waited_for(patch: Patch) -> None:
    """Its first caches arrive while peers that were let in earlier still write."""
    patch.setattr(Writers, "trouble", property(lambda self: ""))


def who_greets_is_answered_at_once(patch: Patch) -> None:
    """What was shared with the scheduler before is still open when the next one is welcome."""
    note = Transfers._note_greeting

    def hurried(
        self: Transfers, message: Hello | Welcome, now: float
    ) -> tuple[list[TransferEvent], bool]:
        return note(self, message, now)[0], False

    patch.setattr(Transfers, "_note_greeting", hurried)


def a_greeting_proves_nothing(patch: Patch) -> None:
    """Pages that the scheduler before was to fill stay in quarantine for ever."""
    patch.setattr(Writers, "take_greeted", lambda self, message: [])


MUTATIONS = (
    Mutation("nobody-is-waited-for", nobody_is_waited_for, 52),
    Mutation("who-greets-is-answered-at-once", who_greets_is_answered_at_once, 52),
    Mutation("a-greeting-proves-nothing", a_greeting_proves_nothing, 1),
)
