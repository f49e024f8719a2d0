"""Caches of turns that have ended, sent back to prefill servers.

    a stream ends ─► Offer: prompt and answer are here       nothing is kept for it
    asked ─► found once more, and kept while it is sent ─► TransferDone
          └─► gone meanwhile: refused

A cache goes to the server that computed the prompt; if it was computed here, to the one that has
most of it. The next turn of the conversation begins there with what this one has left. Best effort:
whoever needs the pages has them, and losing a return costs a computation. Knows nothing of requests
that run.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from common.failures import Failure, FailureKind
from common.layout.cache_layout import ServerLayout
from common.protocol.peer import Offer
from common.request import TransferTrace
from common.scheduling.cached_sequences import LentCache
from common.scheduling.facts import ServerFacts
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import Sequence
from common.transfers.connection import Connection
from common.transfers.outgoing import ALL_COMPUTED, CacheAsked, OutgoingTransfer
from common.transfers.transfers import AbortAsked, SendProgressed, TargetLost, Transfers
from decode_server.choice import Choice
from decode_server.request import DecodeRequest

ROOM_BITS = 63
# Tokens that the prefill server must lack, for less is computed as quickly.
NEW_TOKENS_MIN = 16
# Offers that may be asked for still, the last so many: a peer asks at once or never.
OFFER_COUNT_MAX = 256
NO_TOKEN = 0
COUNTED = ("returns_offered", "returns_sent", "returns_failed", "returned_tokens")
GONE = Failure(FailureKind.NOT_HELD, "the cache that was offered is not here any more")


@dataclass(frozen=True, slots=True)
class _Offered:
    peer: str
    token_count: int
    token_ids: array[int]
    digests: bytes


class Returns:
    """Owner of what is lent for them. choice: of the server for a turn that was computed here.
    is_on: whether anything is offered at all."""

    def __init__(
        self,
        facts: ServerFacts,
        account: PageAccount,
        transfers: Transfers,
        outbox: Outbox,
        choice: Choice,
        rng: random.Random,
        *,
        is_on: bool,
    ) -> None:
        self._facts = facts
        self._account = account
        self._transfers = transfers
        self._outbox = outbox
        self._choice = choice
        self._rng = rng
        self._is_on = is_on and account.keeps_prefixes
        self._ended: list[tuple[DecodeRequest, Sequence]] = []
        self._offers: OrderedDict[int, _Offered] = OrderedDict()
        self._lent: dict[int, LentCache] = {}
        self.counters = dict.fromkeys(COUNTED, 0.0)

    @property
    def lent(self) -> list[LentCache]:
        return list(self._lent.values())

    # ---- offered ---------------------------------------------------------------------------------

    def offer(self, ended: Iterable[tuple[DecodeRequest, Sequence]], now: float) -> None:
        """Offer the caches of streams that have ended, as soon as no step touches their pages and
        the prefix cache has them. ended: since the last call."""
        self._ended += [one for one in ended if self._is_worth(one[0])]
        waiting: list[tuple[DecodeRequest, Sequence]] = []
        for request, sequence in self._ended:
            if sequence.node is not None:
                waiting.append((request, sequence))
            else:
                self._offer(request, now)
        self._ended = waiting

    def _is_worth(self, request: DecodeRequest) -> bool:
        """Which of several answers to one prompt is gone on from, if any, nobody knows."""
        known_count = request.prompt_count if request.link else 0
        new_count = len(request.token_ids) - 1 - known_count
        is_kept = self._is_on and bool(request.digests) and not request.is_sample
        return is_kept and new_count >= NEW_TOKENS_MIN

    def _peer_of(self, request: DecodeRequest, now: float) -> tuple[Connection | None, int]:
        """The server that the next turn would be sent to, and how many tokens of this one's cache
        it has."""
        if request.link:
            return self._transfers.links.connections.on_link(request.link), request.prompt_count
        return self._choice.home_of(request, now)

    def _offer(self, request: DecodeRequest, now: float) -> None:
        peer, known_count = self._peer_of(request, now)
        if peer is None or not (peer.is_target and peer.is_source):
            return
        token_ids = request.token_ids
        digests = self._account.cached.digests_of(request.digests, token_ids)
        match = self._account.match(digests, token_ids, len(token_ids) - 1)
        token_count = match.token_count
        if token_count - known_count < NEW_TOKENS_MIN or not _is_whole(match):
            return
        block = block_tokens(peer.remote.layout, self._facts.digest_tokens)
        next_token_ids = token_ids[token_count : token_count + self._facts.digest_lookahead]
        named_count = token_count + len(next_token_ids)
        room = self._rng.getrandbits(ROOM_BITS)
        kept = array("i", token_ids)
        self._offers[room] = _Offered(peer.incarnation, token_count, kept, digests)
        if len(self._offers) > OFFER_COUNT_MAX:
            self._offers.popitem(last=False)
        self.counters["returns_offered"] += 1
        self._outbox.to_peer(
            peer.link,
            Offer(
                room,
                self._facts.incarnation,
                peer.incarnation,
                token_count,
                self._account.cached.digests_up_to(digests, named_count),
                token_ids[token_count - token_count % block : token_count],
                next_token_ids,
            ),
        )

    # ---- asked -----------------------------------------------------------------------------------

    def apply(
        self, event: CacheAsked | SendProgressed | AbortAsked | TargetLost, now: float
    ) -> None:
        """What happens to caches that leave this server."""
        match event:
            case CacheAsked(transfer=transfer):
                self._handle_asked(transfer, now)
            case SendProgressed(transfer=transfer):
                self._end_if_settled(transfer, now)
            case AbortAsked(transfer=transfer):
                self._stop(transfer, Failure(FailureKind.ABORTED, event.reason), now)
            case TargetLost(transfers=orphans):
                # What its own last report ended, which lost the peer as well, has ended already.
                known = self._transfers.outgoing.get
                for transfer in (one for one in orphans if known(one.transfer_id) is one):
                    self._stop(transfer, Failure(FailureKind.PEER_LOST, event.reason), now)

    def _handle_asked(self, transfer: OutgoingTransfer, now: float) -> None:
        """Send what was offered, if it is still here."""
        offered = self._offers.pop(transfer.room, None) if transfer.room is not None else None
        lent: LentCache | None = None
        if (
            offered is not None
            and offered.peer == transfer.peer
            and offered.token_count == transfer.token_count
        ):
            match = self._account.match(offered.digests, offered.token_ids, offered.token_count)
            if match.token_count == offered.token_count and _is_whole(match):
                lent = self._account.cached.lend(match)
        if lent is None:
            self._transfers.outgoing.refuse(transfer, GONE, now)
            return
        self._lent[transfer.transfer_id] = lent
        count = transfer.token_count
        self._transfers.outgoing.send(transfer, lent.pages, count, ALL_COMPUTED, is_final=True)
        self._transfers.outgoing.ask_digests(transfer, lent.pages)

    def _stop(self, transfer: OutgoingTransfer, failure: Failure, now: float) -> None:
        """Nobody wants it any more."""
        transfer.failure = transfer.failure or failure
        self._transfers.outgoing.cancel(transfer)
        self._end_if_settled(transfer, now)

    def _end_if_settled(self, transfer: OutgoingTransfer, now: float) -> None:
        """Puts or digests have come back; perhaps the last ones."""
        lent, outgoing = self._lent.get(transfer.transfer_id), self._transfers.outgoing
        failure = transfer.failure
        if transfer.sends_open or (failure is None and transfer.is_on_its_way):
            return
        if lent is not None:
            del self._lent[transfer.transfer_id]
            self._account.cached.take_back(lent)
        if failure is not None:
            self.counters["returns_failed"] += 1
            outgoing.refuse(transfer, failure, now)
            return
        self.counters["returns_sent"] += 1
        self.counters["returned_tokens"] += transfer.token_count - transfer.request.token_start
        outgoing.finish(transfer, [NO_TOKEN], TransferTrace(), [], [])


def _is_whole(match: Match) -> bool:
    """Whether all of a cache is there at the token where it would be gone on from."""
    return match.checkpoint is None or match.checkpoint.token_count == match.token_count


def block_tokens(layout: ServerLayout, digest_tokens: int) -> int:
    """Tokens of a block of the prefix cache of a server."""
    growing = [group.page_tokens for group in layout.groups if group.live.is_streamable]
    return lcm(digest_tokens, *growing)
