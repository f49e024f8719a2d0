"""Hand-overs that are under way, and the pages that a silent writer may still reach.

    reserve -> under way -> settled: pages go to the request, or back to the pool
                         -> abandoned: pages in quarantine -> writer proved quiet -> pool

Only two things prove a writer quiet: its own terminal message for the transfer, or the proof that
the whole peer incarnation can not write any more. No timer does.
"""

from __future__ import annotations

from collections import Counter

from common.protocol.peer import Abort
from common.scheduling.peers import Outbox
from common.scheduling.sequence import PageAccount
from decode_server.request import DecodeRequest, Transfer

# How often an Abort that has not been answered is sent again.
ABORT_REPEAT_S = 1.0


class Receiver:
    """Owner of every `Transfer`."""

    def __init__(self, incarnation: str, account: PageAccount, outbox: Outbox) -> None:
        self._incarnation = incarnation
        self._account = account
        self._outbox = outbox
        self._under_way: dict[int, Transfer] = {}
        self._abandoned: dict[int, Transfer] = {}
        self._repeat_at = 0.0

    @property
    def under_way_count(self) -> int:
        return len(self._under_way)

    @property
    def abandoned_count(self) -> int:
        return len(self._abandoned)

    def is_known(self, transfer_id: int) -> bool:
        return transfer_id in self._under_way or transfer_id in self._abandoned

    def counts_by_link(self) -> dict[str, int]:
        """Hand-overs under way per prefill server."""
        return dict(Counter(transfer.link for transfer in self._under_way.values()))

    def tokens_from(self, link: str) -> int:
        """Tokens asked of a prefill server and not yet delivered: our share of its load."""
        return sum(t.token_count for t in self._under_way.values() if t.link == link)

    def add(self, transfer: Transfer) -> None:
        assert not self.is_known(transfer.transfer_id)
        self._under_way[transfer.transfer_id] = transfer

    def take(self, transfer_id: int) -> Transfer | None:
        """The transfer has ended with its writer quiet; its pages go to whoever takes it."""
        return self._under_way.pop(transfer_id, None)

    def abandon(self, transfer: Transfer, reason: str) -> None:
        """Give up on a transfer whose writer may still write: quarantine and ask it to stop."""
        self._set_aside(transfer)
        self._outbox.to_peer(transfer.link, self._abort(transfer, reason))

    def abandon_peer(self, incarnation: str) -> list[DecodeRequest]:
        """The peer was lost: set its transfers aside; the requests that need another one."""
        orphans: list[DecodeRequest] = []
        for transfer in list(self._under_way.values()):
            if transfer.peer == incarnation:
                if transfer.request is not None:
                    orphans.append(transfer.request)
                self._set_aside(transfer)
        return orphans

    def repeat_aborts(self, now: float) -> None:
        """Ask again for what has not been answered: a connection that broke loses messages."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + ABORT_REPEAT_S
        for transfer in self._abandoned.values():
            self._outbox.to_peer(transfer.link, self._abort(transfer, "asked again"))

    def apply_quiet(self, transfer_id: int) -> bool:
        """The writer's terminal message for an abandoned transfer: its pages are free again."""
        transfer = self._abandoned.pop(transfer_id, None)
        if transfer is None:
            return False
        for group, span in enumerate(transfer.spans):
            self._account.pool.release_quarantined(group, span.page_ids)
        return True

    def apply_gone(self, incarnation: str) -> None:
        """Nothing of this peer incarnation can write any more."""
        for transfer in list(self._abandoned.values()):
            if transfer.peer == incarnation:
                self.apply_quiet(transfer.transfer_id)

    def _set_aside(self, transfer: Transfer) -> None:
        del self._under_way[transfer.transfer_id]
        self._abandoned[transfer.transfer_id] = transfer
        transfer.request = None
        for group, span in enumerate(transfer.spans):
            self._account.pool.quarantine(group, span.page_ids)

    def _abort(self, transfer: Transfer, reason: str) -> Abort:
        return Abort(transfer.transfer_id, self._incarnation, transfer.peer, reason)
