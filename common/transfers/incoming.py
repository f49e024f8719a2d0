"""Caches that other servers write into this one: pages reserved, awaited, compared, given back.

    reserve -> under way -> its last message -> digests compared -> ready | failed
                         -> abandoned: pages in quarantine -> writer proved quiet -> pool

Only two things prove a writer quiet: its own terminal message for the transfer, or the proof that
the whole peer incarnation can not write any more. No timer does. A writer whose connection broke
knows that nothing of its own runs, but not what the network still carries: its message is proof
once our ranks have closed what it wrote through, which it is told. Staged pages are written by our
own workers: they report that they have forgotten a transfer as well. Where the pool is hidden from
peers, that report alone is proof.

A transfer may begin behind a prefix that is here already. Its pages are read by others meanwhile:
they are in no message, nothing writes them, and they are never given back or quarantined here.

A transfer belongs to an owner, a number that means nothing here. Knows nothing of requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.config import TransferMode, Verify
from common.failures import Failure, FailureKind
from common.protocol.digests import Digested
from common.protocol.peer import Abort, Quiesced, TransferDone, TransferFailed, TransferRequest
from common.protocol.worker import Expect, Forget, Forgotten, ReclaimPeer
from common.scheduling.facts import ServerFacts
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox, RankSet
from common.scheduling.prefix import Prefix
from common.transfers.comparison import Comparisons
from common.transfers.connection import Connection
from common.transfers.incoming_transfer import (
    Ask,
    CacheFailed,
    CacheReady,
    IncomingResult,
    IncomingTransfer,
)

# How often an Abort that has not been answered is sent again.
ABORT_REPEAT_S = 1.0


@dataclass(slots=True, eq=False)
class _Abandoned:
    """A transfer without an owner, and what is known of those that could still write its pages.

    is_quiet: the peer can not. forgotten: ranks of ours that will not; is_forgotten: all of them.
    is_closed: our ranks have closed what it was written through.
    """

    transfer: IncomingTransfer
    forgotten: RankSet
    is_quiet: bool
    is_forgotten: bool = False
    is_closed: bool = False


class Incoming:
    """Owner of every `IncomingTransfer`. stale_count: terminal messages that no transfer is of."""

    def __init__(self, facts: ServerFacts, account: PageAccount, outbox: Outbox) -> None:
        self._incarnation = facts.incarnation
        self._rank_count = facts.rank_count
        self._may_stage = facts.transfer_mode is not TransferMode.DIRECT
        self._account = account
        self._outbox = outbox
        self._comparisons = Comparisons(facts, outbox)
        self._under_way: dict[int, IncomingTransfer] = {}
        self._abandoned: dict[int, _Abandoned] = {}
        self._open: Counter[int] = Counter()
        self._repeat_at = 0.0
        self._page_nbytes = [facts.layout.page_nbytes(g) for g in range(len(account.groups))]
        self._counters = dict.fromkeys(("transfer_tokens_spared", "transfer_nbytes_spared"), 0.0)
        self.stale_count = 0

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        return {**self._comparisons.counters, **self._counters}

    @property
    def under_way(self) -> list[IncomingTransfer]:
        """Transfers that an owner waits for."""
        return list(self._under_way.values())

    @property
    def under_way_count(self) -> int:
        return len(self._under_way)

    @property
    def abandoned(self) -> list[IncomingTransfer]:
        """Transfers whose pages have not come back."""
        return [one.transfer for one in self._abandoned.values()]

    @property
    def abandoned_count(self) -> int:
        return len(self._abandoned)

    def get(self, transfer_id: int) -> IncomingTransfer | None:
        """A transfer that is under way, or whose cache is there and not compared yet."""
        return self._under_way.get(transfer_id)

    def is_known(self, transfer_id: int) -> bool:
        return transfer_id in self._under_way or transfer_id in self._abandoned

    def in_flight(self) -> Counter[str]:
        """Transfers under way, by the incarnation of their writer."""
        return Counter(transfer.peer for transfer in self._under_way.values())

    def open_count(self, attachment: int) -> int:
        """Transfers that use a credit of the peer that is attached so."""
        return self._open[attachment]

    @property
    def is_quiet(self) -> bool:
        """Whether no peer has a page of this server to write to."""
        return not self._under_way and not self._abandoned

    def is_asked(self, incarnation: str) -> bool:
        """Whether a cache of this peer is waited for."""
        return any(
            transfer.peer == incarnation and not transfer.is_quiet
            for transfer in self._under_way.values()
        )

    def uses(self, link: str) -> bool:
        """Whether a last message of a transfer is awaited on a link."""
        known = (*self._under_way.values(), *self.abandoned)
        return any(transfer.link == link and not transfer.is_quiet for transfer in known)

    # ---- from its beginning to its end -----------------------------------------------------------

    def reserve(
        self,
        source: Connection,
        transfer_id: int,
        owner: int,
        token_count: int,
        ask: Ask,
        prefix: Prefix | None = None,
    ) -> IncomingTransfer:
        """Reserve pages for a cache, which must be there, and ask a server for it.

        prefix: what is here of it and stays here until the transfer ends, if the source can leave
        it out. None: all of it is asked for.
        """
        assert not self.is_known(transfer_id)
        groups = self._account.groups
        prefix = prefix or Prefix(0, [[] for _ in groups])
        assert prefix.fits(groups, token_count) and (
            source.remote.sends_rest or not prefix.token_count
        )
        spans = self._account.spans_for_prompt(token_count)
        for span, pages in zip(spans, prefix.pages, strict=True):
            span.page_ids.extend(pages)
        needs = self._account.needs(spans, token_count)
        for span, pages in zip(spans, self._account.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        remote = source.remote
        transfer = IncomingTransfer(
            transfer_id=transfer_id,
            owner=owner,
            link=source.link,
            peer=source.incarnation,
            token_count=token_count,
            spans=spans,
            writers=remote.writers,
            mode=remote.transfer_mode,
            verify=remote.verify,
            source_layout=remote.layout_bytes,
            credit=0 if ask.room is not None else source.attachment,
            token_start=prefix.token_count,
            prefix_page_counts=tuple(map(len, prefix.pages)),
        )
        self._under_way[transfer_id] = transfer
        if transfer.credit:
            self._open[transfer.credit] += 1
        if transfer.mode is not TransferMode.DIRECT:
            self._outbox.to_workers(
                Expect(transfer_id, transfer.peer, token_count, transfer.pages, prefix.token_count)
            )
        self._outbox.to_peer(source.link, self._request(transfer, source.attachment, ask))
        return transfer

    def _request(self, transfer: IncomingTransfer, attachment: int, ask: Ask) -> TransferRequest:
        return TransferRequest(
            transfer_id=transfer.transfer_id,
            incarnation=self._incarnation,
            peer_incarnation=transfer.peer,
            token_count=transfer.token_count,
            pages=transfer.pages,
            budget_ms=max(1, int(1000 * ask.budget_s)),
            writers=list(transfer.writers),
            room=ask.room,
            token_ids=ask.token_ids,
            prompt_count=ask.prompt_count,
            sampling=ask.sampling,
            is_self_test=ask.is_self_test,
            is_held=ask.is_held,
            origin=ask.origin,
            attachment=attachment,
            token_start=transfer.token_start,
            prefix_digests=ask.prefix_digests,
            seeds=list(ask.seeds),
            claim=ask.claim,
        )

    def handle_done(self, link: str, done: TransferDone) -> IncomingResult | None:
        """The cache is there: compared first if it has to be."""
        transfer = self._ended(link, done)
        if transfer is None:
            return None
        if (tuple(done.writers), done.token_count) != (transfer.writers, transfer.token_count):
            text = (
                f"prefill wrote {done.token_count} tokens from ranks {done.writers}, "
                f"expected {transfer.token_count} from {list(transfer.writers)}"
            )
            return self._fail(transfer, Failure(FailureKind.TRANSFER_FAILED, text))
        if transfer.verify is not Verify.OFF:
            self._note_quiet(transfer)
            self._comparisons.begin(transfer, done)
            return None
        return self._finish(transfer, done)

    def handle_failed(self, link: str, failed: TransferFailed) -> CacheFailed | None:
        """A transfer brought nothing."""
        transfer = self._ended(link, failed)
        if transfer is None:
            return None
        kind = FailureKind.of(failed.kind)
        return self._fail(transfer, Failure(kind, failed.message, failed.is_retryable))

    def handle_quiesced(self, link: str, message: Quiesced) -> None:
        if self._is_from_writer(link, message.transfer_id, message.peer_incarnation):
            self._apply_quiet(message.transfer_id)

    def apply_digested(self, message: Digested) -> IncomingResult | None:
        """A rank of ours has digested a cache; the result once all have, if it is waited for."""
        found = self._comparisons.apply(message)
        if found is None or self._under_way.get(message.transfer_id) is not found.transfer:
            return None
        if not found.problem:
            return self._finish(found.transfer, found.done)
        text = f"the cache from {found.transfer.link} is not what was sent: {found.problem}"
        self._outbox.report(f"transfer {message.transfer_id:x}: {text}", is_warning=True)
        failure = Failure(FailureKind.TRANSFER_CORRUPTED, text, is_retryable=True)
        return self._fail(found.transfer, failure, is_other_half_used=True)

    def _ended(self, link: str, message: TransferDone | TransferFailed) -> IncomingTransfer | None:
        """The transfer under way that a terminal message is of. That of an abandoned one proves its
        writer quiet, and nothing more; so does one that comes a second time."""
        if not self._is_from_writer(link, message.transfer_id, message.peer_incarnation):
            return None
        transfer = self._under_way.get(message.transfer_id)
        if transfer is None:
            self._apply_quiet(message.transfer_id)
        return None if transfer is None or transfer.is_quiet else transfer

    def _is_from_writer(self, link: str, transfer_id: int, peer_incarnation: str) -> bool:
        """Whether a terminal message may be taken for proof: it is meant for this process, and came
        on the link of the server that was asked."""
        abandoned = self._abandoned.get(transfer_id)
        transfer = abandoned.transfer if abandoned is not None else self.get(transfer_id)
        is_meant = peer_incarnation == self._incarnation
        if is_meant and transfer is not None and transfer.link == link:
            return True
        self.stale_count += 1
        return False

    def _finish(self, transfer: IncomingTransfer, done: TransferDone) -> CacheReady:
        assert transfer.owner is not None
        ready = CacheReady(transfer, transfer.owner, done)
        self._take(transfer)
        self._counters["transfer_tokens_spared"] += transfer.token_start
        self._counters["transfer_nbytes_spared"] += sum(
            count * nbytes
            for count, nbytes in zip(transfer.prefix_page_counts, self._page_nbytes, strict=True)
        )
        return ready

    def _fail(
        self, transfer: IncomingTransfer, failure: Failure, *, is_other_half_used: bool = False
    ) -> CacheFailed:
        assert transfer.owner is not None
        failed = CacheFailed(
            transfer, transfer.owner, failure, is_other_half_used=is_other_half_used
        )
        self._take(transfer)
        self.release(transfer)
        return failed

    def _take(self, transfer: IncomingTransfer) -> None:
        """The transfer has ended with its writer quiet. Every piece of a transfer that is done was
        credited, so no scatter of it is running."""
        del self._under_way[transfer.transfer_id]
        transfer.owner = None
        self._note_quiet(transfer)
        self._forget(transfer)

    def release(self, transfer: IncomingTransfer) -> None:
        """Give back the pages of a transfer, in the event that ends it. Those of its prefix are its
        caller's to unlock."""
        if transfer.mode is TransferMode.DIRECT:
            for group, (_, pages) in enumerate(transfer.pages):
                self._account.pool.release(group, pages)
        else:
            self._set_aside(transfer, is_quiet=True)

    # ---- given up before its end -----------------------------------------------------------------

    def abandon(self, transfer: IncomingTransfer, reason: str) -> None:
        """Give up a transfer whose writer may still write: quarantine its pages, ask it to stop."""
        if transfer.is_quiet:
            self._take(transfer)
            self.release(transfer)
            return
        self._take_away(transfer)
        self._ask_to_stop(self._abandoned[transfer.transfer_id], reason)

    def abandon_peer(self, incarnation: str) -> list[CacheFailed]:
        """A peer was lost: set its transfers aside. A cache that is here already is still compared,
        which takes no peer."""
        failure = Failure(FailureKind.PEER_LOST, "the prefill server was lost", is_retryable=True)
        failed: list[CacheFailed] = []
        for transfer in self.under_way:
            if transfer.peer == incarnation and not transfer.is_quiet:
                assert transfer.owner is not None
                failed.append(CacheFailed(transfer, transfer.owner, failure))
                self._take_away(transfer)
        return failed

    def repeat_aborts(self, now: float) -> None:
        """Ask again for what has not been answered: a connection that broke loses messages."""
        if now < self._repeat_at:
            return
        self._repeat_at = now + ABORT_REPEAT_S
        for abandoned in self._abandoned.values():
            if not abandoned.is_quiet:
                self._ask_to_stop(abandoned, "asked again")

    def apply_forgotten(self, message: Forgotten) -> None:
        """A rank of ours will not scatter anything of a transfer any more."""
        abandoned = self._abandoned.get(message.transfer_id)
        if abandoned is not None and abandoned.forgotten.add(message.rank):
            abandoned.is_forgotten = True
            self._free_if_out_of_reach(abandoned)

    def apply_closed(self, incarnation: str) -> None:
        """Our ranks have closed what a peer wrote through. It is told with the next Abort, for it
        may live."""
        for abandoned in self._abandoned.values():
            if abandoned.transfer.peer == incarnation:
                abandoned.is_closed = True
                self._repeat_at = 0.0

    def apply_gone(self, incarnation: str) -> None:
        """Nothing of this peer incarnation can write any more."""
        for abandoned in list(self._abandoned.values()):
            if abandoned.transfer.peer == incarnation:
                self._apply_quiet(abandoned.transfer.transfer_id)
        self._outbox.to_workers(ReclaimPeer(incarnation))

    def _apply_quiet(self, transfer_id: int) -> None:
        """The writer of an abandoned transfer is quiet."""
        abandoned = self._abandoned.get(transfer_id)
        if abandoned is not None:
            abandoned.is_quiet = True
            self._note_quiet(abandoned.transfer)
            self._free_if_out_of_reach(abandoned)

    def _note_quiet(self, transfer: IncomingTransfer) -> None:
        """The peer has sent its last message of a transfer, whose credit comes back."""
        transfer.is_quiet = True
        if transfer.credit:
            self._open[transfer.credit] -= 1
            if not self._open[transfer.credit]:
                del self._open[transfer.credit]
            transfer.credit = 0

    def _take_away(self, transfer: IncomingTransfer) -> None:
        del self._under_way[transfer.transfer_id]
        self._forget(transfer)
        self._set_aside(transfer, is_quiet=False)

    def _forget(self, transfer: IncomingTransfer) -> None:
        self._comparisons.forget(transfer.transfer_id)
        if transfer.mode is not TransferMode.DIRECT:
            self._outbox.to_workers(Forget(transfer.transfer_id))

    def _set_aside(self, transfer: IncomingTransfer, *, is_quiet: bool) -> None:
        """Pages that the peer itself can not reach stay used for the moment, not in quarantine."""
        abandoned = _Abandoned(transfer, RankSet(self._rank_count), is_quiet=is_quiet)
        abandoned.is_forgotten = transfer.mode is TransferMode.DIRECT
        self._abandoned[transfer.transfer_id] = abandoned
        transfer.owner = None
        if transfer.mode is not TransferMode.STAGED:
            for group, (_, pages) in enumerate(transfer.pages):
                self._account.pool.quarantine(group, pages)

    def _free_if_out_of_reach(self, abandoned: _Abandoned) -> None:
        transfer, pool = abandoned.transfer, self._account.pool
        is_hidden = transfer.mode is TransferMode.STAGED
        if not abandoned.is_forgotten or not (abandoned.is_quiet or is_hidden):
            return
        del self._abandoned[transfer.transfer_id]
        for group, (_, pages) in enumerate(transfer.pages):
            if is_hidden:
                pool.release(group, pages)
            else:
                pool.release_quarantined(group, pages)

    def _ask_to_stop(self, abandoned: _Abandoned, reason: str) -> None:
        transfer, is_closed = abandoned.transfer, abandoned.is_closed
        abort = Abort(transfer.transfer_id, self._incarnation, transfer.peer, reason, is_closed)
        self._outbox.to_peer(transfer.link, abort)
