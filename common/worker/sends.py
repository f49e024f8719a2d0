"""Hand-overs of one rank: a Send becomes one copy plan per target rank, and settles once for all.

Owned by the I/O thread. Knows nothing of requests or of when their cache is ready: whoever orders a
Send has seen the step that computed it finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import TransportError
from common.planner.copies import Pages
from common.planner.pairing import TokenRange
from common.protocol.local import CancelSends, Send, SendSettled
from common.transport.transport import TransferSettled, Transport
from common.worker.peer_links import PeerLinks, TargetRank


@dataclass(slots=True)
class _OpenSend:
    """A Send whose plans have not all settled. error: of the first that failed."""

    message: Send
    tags: set[int] = field(default_factory=set)
    error: str = ""
    is_quiet: bool = True
    nbytes: int = 0
    run_count: int = 0
    seconds: float = 0.0


class Sends:
    """Owner of every Send that is under way."""

    def __init__(
        self, transport: Transport, links: PeerLinks, rank: int, page_counts: Sequence[int]
    ) -> None:
        """page_counts: of this rank's own pool, per page group, without the scratch page."""
        self._transport = transport
        self._links = links
        self._rank = rank
        self._page_counts = tuple(page_counts)
        self._open: dict[int, _OpenSend] = {}
        self._send_of_tag: dict[int, int] = {}
        self._next_tag = 1

    @property
    def open_count(self) -> int:
        return len(self._open)

    def send(self, message: Send) -> list[SendSettled]:
        """Start writing; settled at once if there is nothing to write or it can't be done."""
        assert message.send_id not in self._open, f"send {message.send_id} is under way"
        send = _OpenSend(message)
        targets = self._links.targets(message.peer)
        if isinstance(targets, str):
            send.error = targets
            return [self._settle(send)]
        send.error = self._why_refused(message, targets)
        if send.error:
            return [self._settle(send)]
        tokens = TokenRange(message.token_start, message.token_stop, message.is_final)
        for target in targets:
            plan = target.pair.plan(message.source_pages, message.target_pages, tokens)
            if plan.run_count == 0:
                continue
            tag = self._next_tag
            self._next_tag += 1
            try:
                self._transport.submit(target.name, plan, tag)
            except TransportError as exc:
                send.error = str(exc)
                break
            send.tags.add(tag)
            self._send_of_tag[tag] = message.send_id
        if not send.tags:
            return [self._settle(send)]
        self._open[message.send_id] = send
        if send.error:
            self._cancel(send)
        return []

    def cancel(self, message: CancelSends) -> None:
        for send in self._open.values():
            if send.message.transfer_id == message.transfer_id:
                self._cancel(send)

    def apply_settled(self, event: TransferSettled) -> list[SendSettled]:
        """One plan of a Send has returned."""
        send = self._open[self._send_of_tag.pop(event.tag)]
        send.tags.remove(event.tag)
        send.nbytes += event.nbytes
        send.run_count += event.run_count
        send.seconds = max(send.seconds, event.seconds)
        send.is_quiet = send.is_quiet and event.is_quiet
        if event.error is not None and not send.error:
            send.error = event.error
            self._cancel(send)  # the other target ranks' bytes are of no use any more
        if send.tags:
            return []
        del self._open[send.message.send_id]
        return [self._settle(send)]

    def _cancel(self, send: _OpenSend) -> None:
        for tag in sorted(send.tags):
            self._transport.cancel(tag)

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
        )

    def _why_refused(self, message: Send, targets: Sequence[TargetRank]) -> str:
        """What is wrong with the page ids, or "". A bad one would write into another request."""
        reason = _bad_pages("source", message.source_pages, self._page_counts)
        for target in targets:
            reason = reason or _bad_pages("target", message.target_pages, target.page_counts)
        return reason


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
