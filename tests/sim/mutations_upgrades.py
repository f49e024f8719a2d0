"""Planted bugs of servers that count on more than was agreed on with one of the first release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.transfers.connection import Connection, ConnectionPhase, Remote
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def all_are_taken_to_send_rests(patch: Patch) -> None:
    """A rest is asked for where the field that says from which token on is not read."""
    of: Callable[..., Remote] = Remote.of

    def of_all(*parts: object, **named: object) -> Remote:
        return replace(of(*parts, **named), sends_rest=True)

    patch.setattr(Remote, "of", staticmethod(of_all))


def who_is_connected_is_offered_caches(patch: Patch) -> None:
    """Of a server that said it takes none, which can't read the message."""
    is_connected = property(lambda self: self.phase is ConnectionPhase.CONNECTED)
    patch.setattr(Connection, "is_target", is_connected)


MUTATIONS = (
    Mutation("all-are-taken-to-send-rests", all_are_taken_to_send_rests, 1),
    Mutation("who-is-connected-is-offered-caches", who_is_connected_is_offered_caches, 17),
)
