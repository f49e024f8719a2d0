"""Transfers that are under way, and the pages that a silent writer may still reach.

    reserve -> under way -> settled: pages go to the request, or back to the pool
                         -> abandoned: pages in quarantine -> writer proved quiet -> pool

Only two things prove a writer quiet: its own terminal message for the transfer, or the proof that
the whole peer incarnation can not write any more. No timer does. A writer whose connection broke
can say that nothing of its own runs, but not what the network still carries: it is told when our
ranks have closed what it wrote through, and then its word is proof. What is staged is written by
our own workers: their word that they have forgotten a transfer is asked for as well, and where
nothing but them can write (`staged`) it is proof enough.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.config import TransferMode
from common.protocol.peer import Abort
from common.protocol.worker import Expect, Forget, Forgotten, ReclaimPeer
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox, RankSet
from common.scheduling.sequence import PageAccount
from decode_server.request import DecodeRequest, Transfer

# How often an Abort that has not been answered is sent again.
ABORT_REPEAT_S = 1.0


@dataclass(slots=True, eq=False)
class _Abandoned:
    """A transfer nobody waits for, and what is known of those who could still write its pages.

    is_quiet: the peer can not. forgotten: ranks of ours that will not; is_forgotten: all of them.
    is_closed: our ranks have closed what it was written through.
    """

    transfer: Transfer
    forgotten: RankSet
    is_quiet: bool
    is_forgotten: bool = False
    is_closed: bool = False


class Receiver:
    """Owner of every `Transfer`."""

    def __init__(self, facts: ServerFacts, account: PageAccount, outbox: Outbox) -> None:
        self._incarnation = facts.incarnation
        self._rank_count = facts.rank_count
        self._may_stage = facts.transfer_mode is not TransferMode.DIRECT
        self._account = account
        self._outbox = outbox
        self._under_way: dict[int, Transfer] = {}
        self._abandoned: dict[int, _Abandoned] = {}
        self._open: Counter[int] = Counter()
        self._repeat_at = 0.0

    @property
    def under_way_count(self) -> int:
        return len(self._under_way)

    def waiting(self) -> list[DecodeRequest]:
        """The requests whose transfers are under way."""
        transfers = self._under_way.values()
        return [transfer.request for transfer in transfers if transfer.request is not None]

    @property
    def abandoned_count(self) -> int:
        return len(self._abandoned)

    def is_known(self, transfer_id: int) -> bool:
        return transfer_id in self._under_way or transfer_id in self._abandoned

    def link_of(self, transfer_id: int) -> str | None:
        """The link of the server that writes for a transfer; None if there is no such transfer."""
        if transfer_id in self._under_way:
            return self._under_way[transfer_id].link
        abandoned = self._abandoned.get(transfer_id)
        return abandoned.transfer.link if abandoned is not None else None

    def counts_by_link(self) -> dict[str, int]:
        """Transfers under way per prefill server."""
        return dict(Counter(transfer.link for transfer in self._under_way.values()))

    def open_count(self, attachment: int) -> int:
        """Transfers that use a credit of the peer that is attached so."""
        return self._open[attachment]

    def note_quiet(self, transfer: Transfer) -> None:
        """The peer has said its last word of a transfer, whose credit comes back."""
        transfer.is_quiet = True
        if transfer.credit:
            self._open[transfer.credit] -= 1
            if not self._open[transfer.credit]:
                del self._open[transfer.credit]
            transfer.credit = 0

    def add(self, transfer: Transfer) -> None:
        """Begin to wait for a transfer; if pieces of it may be staged, our workers are told."""
        assert not self.is_known(transfer.transfer_id)
        self._under_way[transfer.transfer_id] = transfer
        if transfer.credit:
            self._open[transfer.credit] += 1
        if transfer.mode is not TransferMode.DIRECT:
            pages = [(span.first_index, list(span.page_ids)) for span in transfer.spans]
            expect = Expect(transfer.transfer_id, transfer.peer, transfer.token_count, pages)
            self._outbox.to_workers(expect)

    def get(self, transfer_id: int) -> Transfer | None:
        """A transfer that is under way, or whose cache is there and not verified yet."""
        return self._under_way.get(transfer_id)

    def take(self, transfer_id: int) -> Transfer | None:
        """The transfer has ended with its writer quiet; its pages go to whoever takes it.

        Every piece of a transfer that is done was credited, so no scatter of it is running.
        """
        transfer = self._under_way.pop(transfer_id, None)
        if transfer is not None:
            self.note_quiet(transfer)
            self._forget(transfer)
        return transfer

    def release(self, transfer: Transfer) -> None:
        """Give back the pages of a transfer that was taken and is of no use to anybody."""
        if transfer.mode is TransferMode.DIRECT:
            for group, span in enumerate(transfer.spans):
                self._account.pool.release(group, span.page_ids)
        else:
            self._set_aside(transfer, is_quiet=True)

    def abandon(self, transfer: Transfer, reason: str) -> None:
        """Give up on a transfer whose writer may still write: quarantine and ask it to stop."""
        if transfer.is_quiet:
            self.take(transfer.transfer_id)
            self.release(transfer)
            return
        self._take_away(transfer)
        self._ask_to_stop(self._abandoned[transfer.transfer_id], reason)

    def is_asked(self, incarnation: str) -> bool:
        """Whether something of this peer is waited for."""
        return any(
            transfer.peer == incarnation and not transfer.is_quiet
            for transfer in self._under_way.values()
        )

    def abandon_peer(self, incarnation: str) -> list[DecodeRequest]:
        """The peer was lost: set its transfers aside; the requests that need another one.

        A cache that is here already is still looked through: that takes no peer.
        """
        orphans: list[DecodeRequest] = []
        for transfer in list(self._under_way.values()):
            if transfer.peer == incarnation and not transfer.is_quiet:
                if transfer.request is not None:
                    orphans.append(transfer.request)
                self._take_away(transfer)
        return orphans

    def repeat_aborts(self, now: float) -> None:
        """Ask again for what has not been answered: a connection that broke loses messages."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + ABORT_REPEAT_S
        for abandoned in self._abandoned.values():
            if not abandoned.is_quiet:
                self._ask_to_stop(abandoned, "asked again")

    def apply_quiet(self, transfer_id: int) -> bool:
        """The writer's terminal message for an abandoned transfer; whether there is such a one."""
        abandoned = self._abandoned.get(transfer_id)
        if abandoned is None:
            return False
        abandoned.is_quiet = True
        self.note_quiet(abandoned.transfer)
        self._free_if_out_of_reach(abandoned)
        return True

    def apply_forgotten(self, message: Forgotten) -> None:
        """A rank of ours will not scatter anything of a transfer any more."""
        abandoned = self._abandoned.get(message.transfer_id)
        if abandoned is not None and abandoned.forgotten.add(message.rank):
            abandoned.is_forgotten = True
            self._free_if_out_of_reach(abandoned)

    def apply_closed(self, incarnation: str) -> None:
        """Our ranks have closed what this peer incarnation wrote through: it is told at the next
        occasion, for it may live."""
        for abandoned in self._abandoned.values():
            if abandoned.transfer.peer == incarnation:
                abandoned.is_closed = True
                self._repeat_at = 0.0

    def apply_gone(self, incarnation: str) -> None:
        """Nothing of this peer incarnation can write any more."""
        for abandoned in list(self._abandoned.values()):
            if abandoned.transfer.peer == incarnation:
                self.apply_quiet(abandoned.transfer.transfer_id)
        if self._may_stage:
            self._outbox.to_workers(ReclaimPeer(incarnation))

    def _take_away(self, transfer: Transfer) -> None:
        del self._under_way[transfer.transfer_id]
        self._forget(transfer)
        self._set_aside(transfer, is_quiet=False)

    def _forget(self, transfer: Transfer) -> None:
        if transfer.mode is not TransferMode.DIRECT:
            self._outbox.to_workers(Forget(transfer.transfer_id))

    def _set_aside(self, transfer: Transfer, *, is_quiet: bool) -> None:
        """Pages that the peer itself can not reach stay used for the moment, not in quarantine."""
        abandoned = _Abandoned(transfer, RankSet(self._rank_count), is_quiet=is_quiet)
        abandoned.is_forgotten = transfer.mode is TransferMode.DIRECT
        self._abandoned[transfer.transfer_id] = abandoned
        transfer.request = None
        if transfer.mode is not TransferMode.STAGED:
            for group, span in enumerate(transfer.spans):
                self._account.pool.quarantine(group, span.page_ids)

    def _free_if_out_of_reach(self, abandoned: _Abandoned) -> None:
        transfer, pool = abandoned.transfer, self._account.pool
        is_hidden = transfer.mode is TransferMode.STAGED
        if not abandoned.is_forgotten or not (abandoned.is_quiet or is_hidden):
            return
        del self._abandoned[transfer.transfer_id]
        for group, span in enumerate(transfer.spans):
            if is_hidden:
                pool.release(group, span.page_ids)
            else:
                pool.release_quarantined(group, span.page_ids)

    def _ask_to_stop(self, abandoned: _Abandoned, reason: str) -> None:
        transfer, is_closed = abandoned.transfer, abandoned.is_closed
        abort = Abort(transfer.transfer_id, self._incarnation, transfer.peer, reason, is_closed)
        self._outbox.to_peer(transfer.link, abort)
