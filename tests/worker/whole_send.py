"""A Send together with the pages of its transfer, which workers receive once for all its Sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.protocol.worker import OpenTransfer, Send, SendSettled

if TYPE_CHECKING:  # it needs torch
    from common.worker.sends import Sends

PageLists = list[tuple[int, list[int]]]


@dataclass(frozen=True)
class WholeSend:
    """Fields as in OpenTransfer and Send."""

    send_id: int
    step_id: int
    transfer_id: int
    peer: str
    token_start: int
    token_stop: int
    is_final: bool
    source_pages: PageLists
    target_pages: PageLists

    @staticmethod
    def of(send: Send, transfer: OpenTransfer) -> WholeSend:
        """As a worker puts the two together."""
        pages = transfer.source_pages
        if send.window_pages:
            pages = [
                window if window[1] else found
                for window, found in zip(send.window_pages, pages, strict=True)
            ]
        return WholeSend(
            send_id=send.send_id,
            step_id=send.step_id,
            transfer_id=send.transfer_id,
            peer=transfer.peer,
            token_start=send.token_start,
            token_stop=send.token_stop,
            is_final=send.is_final,
            source_pages=pages,
            target_pages=transfer.target_pages,
        )

    @property
    def opening(self) -> OpenTransfer:
        return OpenTransfer(self.transfer_id, self.peer, self.source_pages, self.target_pages)

    @property
    def send(self) -> Send:
        """After the opening of its transfer."""
        tokens = (self.token_start, self.token_stop)
        return Send(self.send_id, self.step_id, self.transfer_id, *tokens, self.is_final)


def send_whole(sends: Sends, whole: WholeSend) -> list[SendSettled]:
    """Open the transfer if this is the first Send of it, and begin the Send."""
    if not sends.has_transfer(whole.transfer_id):
        sends.open(whole.opening)
    return sends.send(whole.send)
