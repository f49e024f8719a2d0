"""Bugs of the pages that the Sends of a transfer share.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.protocol.worker import CloseTransfer
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from common.transfers.links import Links
from common.transfers.outgoing import Outgoing, OutgoingTransfer, PageLists
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def pages_of_a_transfer_are_kept(patch: Patch) -> None:
    forget = Outgoing._forget

    def forget_silently(self: Outgoing, transfer: OutgoingTransfer) -> None:
        transfer.is_opened = False
        forget(self, transfer)

    patch.setattr(Outgoing, "_forget", forget_silently)


def windows_of_the_first_chunk_leave(patch: Patch) -> None:
    """Window pages are told with all others, and they have moved along until they leave."""
    init = Outgoing.__init__

    def init_without_windows(
        self: Outgoing, facts: ServerFacts, links: Links, outbox: Outbox, *, token_max: int
    ) -> None:
        init(self, facts, links, outbox, token_max=token_max)
        self._is_window = [False] * len(self._is_window)

    patch.setattr(Outgoing, "__init__", init_without_windows)


def a_transfer_is_closed_with_its_last_send(patch: Patch) -> None:
    """Workers are to forget pages that puts still read."""
    send = Outgoing.send

    def send_and_close(
        self: Outgoing,
        transfer: OutgoingTransfer,
        pages: PageLists,
        token_stop: int,
        step_id: int,
        *,
        is_final: bool,
    ) -> None:
        send(self, transfer, pages, token_stop, step_id, is_final=is_final)
        if is_final:
            self._outbox.to_workers(CloseTransfer(transfer.transfer_id))
            transfer.is_opened = False

    patch.setattr(Outgoing, "send", send_and_close)


MUTATIONS = (
    Mutation("pages-of-a-transfer-are-kept", pages_of_a_transfer_are_kept, 0),
    Mutation("windows-of-the-first-chunk-leave", windows_of_the_first_chunk_leave, 1),
    Mutation("closed-with-its-last-send", a_transfer_is_closed_with_its_last_send, 0),
)
