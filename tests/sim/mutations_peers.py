"""Bugs of prefill servers that come and go while a decode server runs.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from common.protocol.frontend import WantedPeer
from common.transfers.addresses import Addresses
from common.transfers.connection import Address, Connection, Standing
from common.transfers.incoming import Incoming
from common.transfers.links import Links
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def a_removed_peer_is_cut_at_once(patch: Patch) -> None:
    part = Links.part

    def part_at_once(self: Links, address: Address, now: float, *, is_used: bool) -> str | None:
        return part(self, address, now, is_used=False)

    patch.setattr(Links, "part", part_at_once)


def a_removed_peer_is_still_asked(patch: Patch) -> None:
    patch.setattr(Connection, "is_source", Connection.takes_named)


def a_removed_peer_is_left_while_it_may_write(patch: Patch) -> None:
    """What waits for a last message is counted, and what was given up before is not."""

    def uses(self: Incoming, link: str) -> bool:
        return any(one.link == link for one in self.under_way)

    patch.setattr(Incoming, "uses", uses)


def a_peer_that_comes_back_is_forgotten(patch: Patch) -> None:
    """Who leaves is taken for known, and leaves on."""
    want = Addresses.want

    def want_others(self: Addresses, peers: Iterable[WantedPeer]) -> None:
        left = {one.link for one in self.all() if one.standing is Standing.LEAVING}
        want(self, [peer for peer in peers if peer.address not in left])

    patch.setattr(Addresses, "want", want_others)


def a_peer_that_is_only_kept_is_let_go(patch: Patch) -> None:
    want = Addresses.want

    def want_dialled(self: Addresses, peers: Iterable[WantedPeer]) -> None:
        want(self, [peer for peer in peers if peer.is_dialled])

    patch.setattr(Addresses, "want", want_dialled)


MUTATIONS = (
    Mutation("a-removed-peer-is-cut-at-once", a_removed_peer_is_cut_at_once, 4),
    Mutation("a-removed-peer-is-still-asked", a_removed_peer_is_still_asked, 4),
    Mutation(
        "a-removed-peer-is-left-while-it-may-write", a_removed_peer_is_left_while_it_may_write, 4
    ),
    Mutation("a-peer-that-comes-back-is-forgotten", a_peer_that_comes_back_is_forgotten, 17),
    Mutation("a-peer-that-is-only-kept-is-let-go", a_peer_that_is_only_kept_is_let_go, 17),
)
