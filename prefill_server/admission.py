"""Who is computed next.

Knows nothing of what becomes of a request after it was admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    Only two are ever looked at: the oldest, and the shortest if the oldest is not admitted. One
    whose pages were not there is looked at again when some have come back. One that begins as a
    prompt that is being computed follows that: it waits for what the two share.
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
        oldest = self._requests.queue.oldest
        return oldest is not None and self._is_short(oldest)

    @property
    def followed_count(self) -> int:
        """How often a request waited for what another prompt computed."""
        return self._followers.count

    def decide(self, now: float) -> Iterator[Schedule | GiveUpHeld]:
        """In order of arrival; no request passes one that has waited too long. Each decision is
        applied before the next one is made."""
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
            yield Schedule(request, self._account.match(request.digests, tokens, reusable))

    def _holds_up(self, request: PrefillRequest, match: Match) -> bool:
        """Whether a request that has room waits for what is saved in host memory, or comes from
        there."""
        tokens = request.token_ids
        fits = self._account.can_allocate(self._account.needs_behind(match, len(tokens)))
        return fits and self._tier.holds_up(request, reusable_count(tokens, request.sampling))

    def _held_to_give_up(self, now: float) -> PrefillRequest | None:
        """The oldest held cache, if the next request has waited too long for its pages."""
        oldest = self._requests.queue.oldest
        if oldest is None or not self._is_late(oldest, now):
            return None
        return self._requests.oldest_held(now)

    def _next(self, now: float) -> PrefillRequest | None:
        """The request to look at; None if none can be admitted as things are."""
        oldest, shortest = self._requests.queue.oldest, self._requests.queue.shortest
        if oldest is None or shortest is None:
            return None
        if self._is_late(oldest, now):
            shortest = oldest
        for request in (oldest, shortest):
            has_room = self._batcher.has_room_for(len(request.token_ids))
            if has_room and not self._is_short(request):
                return request
        return None

    def _is_late(self, request: PrefillRequest, now: float) -> bool:
        return self._is_short(request) and now - request.short_since > PASSED_OVER_MAX_S

    def _is_short(self, request: PrefillRequest) -> bool:
        """Whether its pages were not there, and none have come back since."""
        return request.relief_seen == self._account.relief_count
