"""Transfers of one rank: a Send becomes copy plans per target rank, and settles once for all.

Owned by the I/O thread. A Send leaves layer group by layer group, as the engine reports them
computed. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import TransportError
from common.layout.cache_layout import RankLayout
from common.planner.copies import PageList, Pages
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange
from common.protocol.worker import CancelSends, CloseTransfer, OpenTransfer, Send, SendSettled
from common.transport.transport import CANCELLED, TransferSettled, Transport
from common.worker.peer_links import PeerLinks, TargetRank
from common.worker.staging.source import StagingSource


@dataclass(frozen=True, slots=True)
class Computed:
    """The engine reports that the first `layer_group_count` layer groups of a step are computed."""

    step_id: int
    layer_group_count: int


@dataclass(slots=True)
class _Transfer:
    """Pages of one transfer, as arrays: a Send of many pages needs no pass over all of them.

    problem: of the page ids, "" if there is none; None before the first Send checks them.
    """

    peer: str
    source_pages: Pages
    target_pages: Pages
    problem: str | None = None


@dataclass(slots=True)
class _OpenSend:
    """A Send that has not settled. error: of the first plan that failed.

    source_pages: all pages that it may read. submitted_count: layer groups that were submitted.
    """

    message: Send
    transfer: _Transfer
    source_pages: Pages
    targets: tuple[TargetRank, ...]
    submitted_count: int = 0
    tags: set[int] = field(default_factory=set)
    error: str = ""
    is_quiet: bool = True
    nbytes: int = 0
    exposed_nbytes: int = 0
    run_count: int = 0
    seconds: float = 0.0


class Sends:
    """Owner of every open Send, and of the pages of every open transfer."""

    def __init__(
        self,
        transport: Transport,
        links: PeerLinks,
        layout: RankLayout,
        page_counts: Sequence[int],
        staging_source: StagingSource | None = None,
    ) -> None:
        """page_counts: of this rank's own pool, per page group, without the scratch page.

        staging_source: takes transfers that are not direct; its settled events come here as well.
        """
        self._transport = transport
        self._staging_source = staging_source
        self._links = links
        self._rank = layout.index
        self._layer_group_count = len(layout.layer_groups)
        self._page_counts = tuple(page_counts)
        self._computed = Computed(0, self._layer_group_count)
        self._transfers: dict[int, _Transfer] = {}
        self._open: dict[int, _OpenSend] = {}
        self._send_of_tag: dict[int, int] = {}
        self._next_tag = 1

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def peers(self) -> set[str]:
        """Those that something is sent to."""
        return {send.transfer.peer for send in self._open.values()}

    @property
    def transfer_count(self) -> int:
        return len(self._transfers)

    def has_transfer(self, transfer_id: int) -> bool:
        """Whether a transfer is open."""
        return transfer_id in self._transfers

    @property
    def is_idle(self) -> bool:
        """Whether the transport has no plan. Open Sends then wait for the engine."""
        return not self._send_of_tag

    def open(self, message: OpenTransfer) -> None:
        """Sends of a transfer will follow."""
        assert message.transfer_id not in self._transfers, f"transfer {message.transfer_id} is open"
        self._transfers[message.transfer_id] = _Transfer(
            message.peer, _as_arrays(message.source_pages), _as_arrays(message.target_pages)
        )

    def close(self, message: CloseTransfer) -> None:
        """No Send of a transfer will follow, and all have settled."""
        transfer = self._transfers.pop(message.transfer_id)
        assert all(send.transfer is not transfer for send in self._open.values())

    def send(self, message: Send) -> list[SendSettled]:
        """Start writing the computed layer groups; settled at once if that is impossible."""
        assert message.send_id not in self._open, f"send {message.send_id} is under way"
        transfer = self._transfers[message.transfer_id]
        windows = _as_arrays(message.window_pages)
        source_pages = transfer.source_pages
        if windows:
            source_pages = [
                window if len(window[1]) else pages
                for window, pages in zip(windows, source_pages, strict=True)
            ]
        targets = self._links.targets(transfer.peer)
        if isinstance(targets, str):
            error, targets = targets, ()
        else:
            error = self._why_refused(transfer, targets)
            if windows:
                error = error or _bad_pages("source", windows, self._page_counts)
        send = _OpenSend(message, transfer, source_pages, targets, error=error)
        self._open[message.send_id] = send
        return self._advance(send)

    def apply_computed(self, computed: Computed) -> list[SendSettled]:
        """The engine has computed more layer groups: Sends that wait for them go on."""
        self._computed = computed
        settled: list[SendSettled] = []
        for send in list(self._open.values()):
            settled += self._advance(send)
        return settled

    def cancel(self, message: CancelSends) -> list[SendSettled]:
        settled: list[SendSettled] = []
        for send in list(self._open.values()):
            if send.message.transfer_id == message.transfer_id:
                settled += self._stop(send, CANCELLED)
        return settled

    def cancel_peer(self, peer: str, reason: str) -> list[SendSettled]:
        """A peer is given up: Sends to it that wait for the engine never leave."""
        settled: list[SendSettled] = []
        for send in list(self._open.values()):
            if send.transfer.peer == peer:
                settled += self._stop(send, reason)
        return settled

    def forget_all(self) -> None:
        """Nothing is under way, and steps are counted anew: another scheduler begins."""
        assert not self._open
        self._transfers.clear()
        self._computed = Computed(0, self._layer_group_count)

    def apply_settled(self, event: TransferSettled) -> list[SendSettled]:
        """One plan of a Send has returned."""
        send = self._open[self._send_of_tag.pop(event.tag)]
        send.tags.remove(event.tag)
        send.nbytes += event.nbytes
        send.run_count += event.run_count
        send.seconds += event.seconds
        send.is_quiet = send.is_quiet and event.is_quiet
        if self._is_computed(send.message.transfer_id):
            send.exposed_nbytes += event.nbytes
        if event.error is not None:
            # The bytes to the other target ranks are of no use now.
            return self._stop(send, event.error)
        return self._advance(send)

    def _stop(self, send: _OpenSend, error: str) -> list[SendSettled]:
        """Submit no more plans of a Send. It settles when its submitted plans have returned."""
        self._fail(send, error)
        return self._advance(send)

    def _fail(self, send: _OpenSend, error: str) -> None:
        """First cause wins."""
        if not send.error:
            send.error = error
            for tag in sorted(send.tags):
                self._transport.cancel(tag)
                if self._staging_source is not None:
                    self._staging_source.cancel(tag)

    def _ready_count(self, message: Send) -> int:
        """Layer groups of a Send that are computed."""
        if message.step_id == self._computed.step_id:
            return self._computed.layer_group_count
        return self._layer_group_count if message.step_id < self._computed.step_id else 0

    def _is_computed(self, transfer_id: int) -> bool:
        """Whether the engine has computed all of a transfer. Bytes that move now are exposed."""
        return any(
            send.message.transfer_id == transfer_id
            and send.message.is_final
            and self._ready_count(send.message) == self._layer_group_count
            for send in self._open.values()
        )

    def _advance(self, send: _OpenSend) -> list[SendSettled]:
        """Submit the computed layer groups; settle if no plan is out and none will follow."""
        while not send.error and send.submitted_count < self._ready_count(send.message):
            self._submit(send, send.submitted_count)
            send.submitted_count += 1
        if send.tags or not (send.error or send.submitted_count == self._layer_group_count):
            return []
        del self._open[send.message.send_id]
        return [self._settle(send)]

    def _submit(self, send: _OpenSend, layer_group: int) -> None:
        message = send.message
        tokens = TokenRange(message.token_start, message.token_stop, message.is_final)
        for target in send.targets:
            tag = self._next_tag
            try:
                is_submitted = self._submit_to(target, tag, send, tokens, layer_group)
            except TransportError as exc:
                self._fail(send, str(exc))
                return
            if is_submitted:
                self._next_tag += 1
                send.tags.add(tag)
                self._send_of_tag[tag] = message.send_id

    def _submit_to(
        self, target: TargetRank, tag: int, send: _OpenSend, tokens: TokenRange, layer_group: int
    ) -> bool:
        """Submit directly or through staging; False if this target rank gets no bytes."""
        if target.pairs:
            plan = target.pairs[layer_group].plan(
                send.source_pages, send.transfer.target_pages, tokens
            )
            if plan.run_count == 0:
                return False
            if not self._prefers_staging(target, plan):
                self._transport.submit(target.name, plan, tag)
                return True
        source, staged = self._staging_source, target.staged
        assert source is not None and staged is not None, (
            "a target rank is written directly or through staging"
        )
        nbytes_max = source.pieces_nbytes_max(target.name)
        pieces = staged.pieces(tokens, nbytes_max, layer_group)
        if pieces:
            transfer_id = send.message.transfer_id
            source.start(tag, target.name, transfer_id, staged, send.source_pages, pieces)
        return bool(pieces)

    def _prefers_staging(self, target: TargetRank, plan: CopyPlan) -> bool:
        if self._staging_source is None or target.staged is None:
            return False
        lane = self._staging_source.lane(target.name)
        if lane is None or lane.cost is None:
            return False
        return lane.cost.prefers_staging(plan.total_nbytes, plan.run_count)

    def _settle(self, send: _OpenSend) -> SendSettled:
        return SendSettled(
            send_id=send.message.send_id,
            transfer_id=send.message.transfer_id,
            rank=self._rank,
            error=send.error,
            nbytes=send.nbytes,
            run_count=send.run_count,
            seconds=send.seconds,
            is_quiet=send.is_quiet,
            exposed_nbytes=send.exposed_nbytes,
        )

    def _why_refused(self, transfer: _Transfer, targets: Sequence[TargetRank]) -> str:
        """The problem of the page ids, or "". A wrong id would write into another request."""
        if transfer.problem is None:
            reason = _bad_pages("source", transfer.source_pages, self._page_counts)
            for target in targets:
                reason = reason or _bad_pages("target", transfer.target_pages, target.page_counts)
            transfer.problem = reason
        return transfer.problem


def _as_arrays(pages: Sequence[tuple[int, list[int]]]) -> list[PageList]:
    return [(first, np.asarray(page_ids, dtype=np.int64)) for first, page_ids in pages]


def _bad_pages(side: str, pages: Pages, page_counts: Sequence[int]) -> str:
    if len(pages) != len(page_counts):
        return f"{side} pages of {len(pages)} page groups: there are {len(page_counts)}"
    for group, ((_, page_ids), page_count) in enumerate(zip(pages, page_counts, strict=True)):
        ids = np.asarray(page_ids, dtype=np.int64)
        if len(ids) == 0 or page_count == 0:  # a group that the rank holds nothing of
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 1 or high > page_count:
            bad = low if low < 1 else high
            return f"{side} page {bad} of group {group}: must be in 1..{page_count}"
        ordered = np.sort(ids)
        repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(repeated):
            return f"{side} page {ordered[repeated[0]]} of group {group} is named twice"
    return ""
