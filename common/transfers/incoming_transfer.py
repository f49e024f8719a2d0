"""One cache that another server writes into this one, and the values that tell of its end."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import TransferMode, Verify
from common.failures import Failure
from common.protocol.peer import TransferDone
from common.request import NO_CLAIM, Claim, Origin, SamplingParams
from common.scheduling.sequence import PageSpan


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One attempt to get a cache. owner: who waits for it; None once it has ended.

    link, peer: of the server that writes, and its incarnation. writers: its ranks.
    token_start: the cache of the tokens before it was here, of groups that grow with every token.
    spans: the pages of the whole cache. The first prefix_page_counts of each group hold what was
        here: nothing writes them, and they are not the transfer's to give back. The others belong
        to the transfer until it ends.
    mode: how they may be written; unless directly, our workers must forget the transfer before the
        pages are reused.
    verify: how much is compared with what was sent; source_layout: of the peer, msgpack.
    credit: the attachment whose credit it uses until its writer is quiet; 0 if it uses none.
    is_quiet: the peer has sent its last message of it.
    """

    transfer_id: int
    owner: int | None
    link: str
    peer: str
    token_count: int
    spans: list[PageSpan]
    writers: tuple[int, ...]
    mode: TransferMode = TransferMode.DIRECT
    verify: Verify = Verify.OFF
    source_layout: bytes = b""
    credit: int = 0
    is_quiet: bool = False
    token_start: int = 0
    prefix_page_counts: tuple[int, ...] = ()

    @property
    def pages(self) -> list[tuple[int, list[int]]]:
        """Per group (first logical index, page ids): those that are written."""
        return [
            (span.first_index + count, span.page_ids[count:])
            for span, count in zip(self.spans, self.prefix_page_counts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of a server beside pages; see `TransferRequest`."""

    room: int | None
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams | None
    budget_s: float
    origin: Origin
    is_self_test: bool = False
    is_held: bool = False
    prefix_digests: bytes = b""
    seeds: tuple[int, ...] = ()
    claim: Claim = NO_CLAIM


@dataclass(frozen=True, slots=True)
class CacheReady:
    """A cache is there, compared if that was agreed. Its pages are the owner's from now on."""

    transfer: IncomingTransfer
    owner: int
    done: TransferDone


@dataclass(frozen=True, slots=True)
class CacheFailed:
    """A transfer brought nothing; its pages are taken care of.

    is_other_half_used: the peer took the transfer for
    well done, so a room that it met in is used up.
    """

    transfer: IncomingTransfer
    owner: int
    failure: Failure
    is_other_half_used: bool = False


IncomingResult = CacheReady | CacheFailed
