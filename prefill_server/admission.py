"""Who is computed next.

Knows nothing of what becomes of a request after it was admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from common.scheduling.batcher import Batcher
from common.scheduling.facts import PASSED_OVER_MAX_S
from common.scheduling.followers import Followers
from common.scheduling.host_tier import HostTier
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import reusable_count
from prefill_server.request import PrefillRequest
from prefill_server.requests import Requests
from prefill_server.returns import Returns

# Requests that wait for copies from or to host memory; more of them would not be computed sooner.
HELD_UP_MAX = 8
# Clients that are looked at, at a time, where none of those before them finds pages.
LINE_COUNT_MAX = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """Begin to compute a request, if its pages are there. match: what is cached of its prompt."""

    request: PrefillRequest
    match: Match


@dataclass(frozen=True, slots=True)
class GiveUpHeld:
    """A held cache makes room."""

    request: PrefillRequest


class Admission:
    """Chooses requests that leave the queue, as many as the next steps compute: a request that
    waits longer finds more in the prefix cache, and holds no pages meanwhile.

    Of the client whose turn it is, only two are ever looked at: the oldest, and the shortest if the
    oldest is not admitted. Those behind are looked at if pages are what the oldest lacks, for a
    while; room in the next steps comes soon, and is for it. One whose pages were not there is
    looked at again when some have come back. One that begins as a prompt that is being computed
    follows that: it waits for what the two share.
    """

    def __init__(
        self,
        account: PageAccount,
        batcher: Batcher,
        requests: Requests,
        returns: Returns,
        tier: HostTier[PrefillRequest],
    ) -> None:
        self._account = account
        self._returns = returns
        self._tier = tier
        self._batcher = batcher
        self._requests = requests
        self._followers = Followers(requests.queue, batcher)

    @property
    def queued_token_count(self) -> int:
        """Tokens that are asked for and not computed yet."""
        return self._requests.queue.token_count + self._batcher.uncomputed_token_count

    @property
    def is_short(self) -> bool:
        """Whether the next request waits for pages."""
        first = self._requests.queue.first
        return first is not None and self._is_short(first)

    @property
    def followed_count(self) -> int:
        """How often a request waited for what another prompt computed."""
        return self._followers.count

    def decide(self, now: float) -> Iterator[Schedule | GiveUpHeld]:
        """In their order; no request passes one that has waited too long, unless it is before it.
        Each decision is applied before the next one is made."""
        self._followers.wake()
        while True:
            held = self._held_to_give_up(now)
            if held is not None:
                yield GiveUpHeld(held)
            request = self._next(now)
            if request is None or len(self._tier.waiting) >= HELD_UP_MAX:
                return
            tokens = request.token_ids
            reusable = reusable_count(tokens, request.sampling)
            match = self._account.match(request.digests, tokens, reusable)
            if self._followers.follows(request, match, request.digests, reusable, len(tokens)):
                continue
            if self._returns.follows(request, match, reusable) or self._holds_up(request, match):
                continue
            if self._next(now) is not request:
                continue  # what was evicted for it is enough for one that is before it
            yield Schedule(request, self._account.match(request.digests, tokens, reusable))

    def _holds_up(self, request: PrefillRequest, match: Match) -> bool:
        """Whether a request that has room waits for what is saved in host memory, or comes from
        there."""
        tokens = request.token_ids
        fits = self._account.can_allocate(self._account.needs_behind(match, len(tokens)))
        return fits and self._tier.holds_up(request, reusable_count(tokens, request.sampling))

    def _held_to_give_up(self, now: float) -> PrefillRequest | None:
        """The oldest held cache, if the next request has waited too long for its pages."""
        first = self._requests.queue.first
        if first is None or not self._is_late(first, now):
            return None
        return self._requests.oldest_held(now)

    def _next(self, now: float) -> PrefillRequest | None:
        """The request to look at; None if none can be admitted as things are."""
        queue = self._requests.queue
        for line in islice(queue.lines(), LINE_COUNT_MAX):
            oldest = queue.oldest_of(line)
            is_late = self._is_late(oldest, now)
            for request in (oldest,) if is_late else (oldest, queue.shortest_of(line)):
                token_count, priority = len(request.token_ids), request.claim.priority
                has_room = self._batcher.has_room_for(token_count, priority)
                if has_room and not self._is_short(request):
                    return request
            if is_late or not self._is_short(oldest):
                return None
        return None

    def _is_late(self, request: PrefillRequest, now: float) -> bool:
        return self._is_short(request) and now - request.short_since > PASSED_OVER_MAX_S

    def _is_short(self, request: PrefillRequest) -> bool:
        """Whether its pages were not there, and none have come back since."""
        return request.relief_seen == self._account.relief_count
