"""Caches that decode servers offer back: asked for if there is room, and kept for the next turn.

    Offer ─► enough of it is lacking, and nobody waits for pages ─► TransferRequest
    TransferDone ─► in the prefix cache, as if it had been computed here

The next turn may come before the return is there: it waits, and then begins behind the answer. Best
effort: a return gives way to requests that wait for pages, and losing it costs a computation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.peer import Offer
from common.request import Origin, SamplingParams
from common.scheduling.cached_sequences import HeldPrefix
from common.scheduling.followers import SPARED_SHARE_MIN
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import NOTHING, Match
from common.scheduling.prefix_tree import equal_count
from common.transfers.incoming_transfer import Ask, CacheFailed, CacheReady, IncomingTransfer
from common.transfers.transfers import CacheOffered, Transfers
from prefill_server.queue import PromptQueue
from prefill_server.request import PrefillRequest

TRANSFER_ID_BITS = 63
# Tokens that must be lacking, for less is computed as quickly.
LACKING_TOKENS_MIN = 16
# Returns that may be under way at a time, and how long each may take.
UNDER_WAY_MAX = 4
BUDGET_S = 10.0
# Tokens before a cache's last block are told apart by its digests, and never looked at.
UNKNOWN_TOKEN = 0
NO_OUTPUT = SamplingParams(max_new_tokens=1, seed=0)
COUNTED = ("returns_asked", "returns_kept", "returns_lost")


@dataclass(frozen=True, slots=True)
class _Return:
    """held: what is here of it already. token_count: of the cache. token_ids: of it, and those that
    a digest covers behind them. followers: requests that wait for it."""

    transfer: IncomingTransfer
    held: HeldPrefix | None
    token_count: int
    token_ids: list[int]
    digests: bytes
    deadline: float
    followers: list[PrefillRequest] = field(default_factory=list)


class Returns:
    """Owner of the caches that are on their way back. is_on: whether any are asked for. queue: of
    requests, in which those that wait for a return are set aside."""

    def __init__(
        self,
        account: PageAccount,
        transfers: Transfers,
        queue: PromptQueue,
        rng: random.Random,
        *,
        is_on: bool,
    ) -> None:
        self._account = account
        self._queue = queue
        self._transfers = transfers
        self._rng = rng
        self._is_on = is_on and account.keeps_prefixes
        self._next_owner = 1
        self._under_way: dict[int, _Return] = {}
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def held(self) -> list[HeldPrefix]:
        """What is kept of those under way."""
        return [one.held for one in self._under_way.values() if one.held is not None]

    def handle_offer(self, offered: CacheOffered, now: float, *, is_short: bool) -> None:
        """Ask for what is lacking, if there is room for it. is_short: a request waits for pages."""
        offer = offered.offer
        if not self._is_on or is_short or len(self._under_way) >= UNDER_WAY_MAX:
            return
        count = offer.token_count
        unknown = [UNKNOWN_TOKEN] * (count - len(offer.rest_token_ids))
        token_ids = [*unknown, *offer.rest_token_ids, *offer.next_token_ids]
        if not self._is_fit(offer, token_ids):
            return
        match = self._account.match(offer.prefix_digests, token_ids, count)
        if match.token_count > count - LACKING_TOKENS_MIN:
            return
        if not self._account.can_allocate(self._account.needs_to_receive(match, count)):
            return
        source = offered.source
        held = self._account.cached.hold(match if source.remote.sends_rest else NOTHING)
        owner, self._next_owner = self._next_owner, self._next_owner + 1
        ask = Ask(offer.room, [], 0, None, BUDGET_S, Origin(), is_held=True)
        transfer_id = self._rng.getrandbits(TRANSFER_ID_BITS)
        prefix = held.prefix if held is not None else None
        transfer = self._transfers.incoming.reserve(source, transfer_id, owner, count, ask, prefix)
        self._under_way[owner] = _Return(
            transfer, held, count, token_ids, offer.prefix_digests, now + BUDGET_S
        )
        self.counters["returns_asked"] += 1

    def _is_fit(self, offer: Offer, token_ids: list[int]) -> bool:
        """Whether a peer's words go together with this server's blocks."""
        cache = self._account.cache
        assert cache is not None
        count, next_count = offer.token_count, len(offer.next_token_ids)
        due = self._account.cached.digest_nbytes(len(token_ids))
        return (
            len(token_ids) == count + next_count
            and count <= self._account.token_capacity
            and next_count <= cache.lookahead
            and len(offer.prefix_digests) == due
            and len(offer.rest_token_ids) == count % cache.block_tokens
        )

    def follows(self, request: PrefillRequest, match: Match, reusable_count: int) -> bool:
        """Whether a request waits for a return that brings enough of what it lacks. match: what is
        here of it, of which it can reuse so many tokens."""
        lacking = len(request.token_ids) - match.token_count
        for one in self._under_way.values():
            brought = self._shared(one, request, match)
            if brought <= reusable_count and brought - match.token_count >= max(
                LACKING_TOKENS_MIN, SPARED_SHARE_MIN * lacking
            ):
                one.followers.append(request)
                self._queue.set_aside(request)
                return True
        return False

    def _shared(self, one: _Return, request: PrefillRequest, match: Match) -> int:
        """Tokens of a return with which a request begins: all of them, or none."""
        cache = self._account.cache
        if cache is None or not request.digests:
            return 0
        _, ours = cache.keys_of(request.digests)
        _, theirs = cache.keys_of(one.digests)
        start, count = match.block_count, cache.named_blocks(len(one.token_ids))
        most = min(len(ours) // DIGEST_NBYTES, count) - start
        if request.digests[:DIGEST_NBYTES] != one.digests[:DIGEST_NBYTES] or most < 0:
            return 0
        shared = start + equal_count(ours, start, theirs, start, most)
        return one.token_count if shared == count else 0

    @property
    def followers(self) -> list[PrefillRequest]:
        return [request for one in self._under_way.values() for request in one.followers]

    def _put_back(self, one: _Return) -> None:
        for request in one.followers:
            if request.request_id in self._queue:
                self._queue.put_back(request)

    def handle_ready(self, ready: CacheReady) -> None:
        """It is found from now on, by the next turn."""
        one = self._under_way.pop(ready.owner)
        self._put_back(one)
        sequence = self._account.adopt(
            0, one.token_ids, one.token_count, NO_OUTPUT, ready.transfer.spans,
            ready.done.token_count, one.digests, one.held,
        )  # fmt: skip
        sequence.cuts.clear()  # its own pages become the checkpoint
        self._account.close(sequence)
        self.counters["returns_kept"] += 1

    def handle_failed(self, failed: CacheFailed) -> None:
        self._forget(failed.owner)

    def review(self, now: float, *, is_short: bool) -> None:
        """Give up those that take too long, and all if a request waits for pages."""
        for owner, one in list(self._under_way.items()):
            if is_short or now > one.deadline:
                self._transfers.incoming.abandon(one.transfer, "it is not waited for any more")
                self._forget(owner)

    def _forget(self, owner: int) -> None:
        one = self._under_way.pop(owner)
        self._put_back(one)
        if one.held is not None:
            self._account.cached.let_go(one.held)
        self.counters["returns_lost"] += 1
