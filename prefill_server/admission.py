"""Who is computed next, and whether its pages fit.

Knows nothing of what becomes of a request after it was admitted.
"""

from __future__ import annotations

from common.scheduling.batcher import Batcher
from common.scheduling.facts import PASSED_OVER_MAX_S
from common.scheduling.sequence import PageAccount, reusable_count
from common.scheduling.transitions import PrefillEvent
from prefill_server.endings import Endings
from prefill_server.followers import Followers
from prefill_server.holds import Holds, expired
from prefill_server.request import PrefillRequest
from prefill_server.requests import RequestTable

# A prompt waits for another one if that spares it this much of what it lacks. For less it would
# lose a step that it could have been part of: all prompts of a template begin alike.
SPARED_SHARE_MIN = 1 / 8


class Admission:
    """Moves requests out of the queue, as many as the next steps compute: what waits longer finds
    more in the prefix cache, and holds no pages meanwhile.

    Only two are ever looked at: the oldest, and the shortest if the oldest is not admitted. One
    whose pages were not there is looked at again when some have come back. One that begins as a
    prompt that is being computed follows that: it waits for what the two share.
    """

    def __init__(
        self,
        table: RequestTable,
        account: PageAccount,
        batcher: Batcher,
        holds: Holds,
        endings: Endings,
    ) -> None:
        self._table = table
        self._account = account
        self._batcher = batcher
        self._holds = holds
        self._endings = endings
        self._followers = Followers(table.queue, batcher)

    @property
    def load_tokens(self) -> int:
        """Tokens that are asked for and not computed yet."""
        return self._table.queue.token_count + self._batcher.uncomputed_token_count

    @property
    def followed_count(self) -> int:
        """How often a request waited for what another prompt computed."""
        return self._followers.count

    def admit(self, now: float) -> None:
        """Start whoever fits, in order of arrival; nobody passes a request that waited too long."""
        self._followers.wake()
        while (request := self._next(now)) is not None:
            self._look_at(request, now)

    def _next(self, now: float) -> PrefillRequest | None:
        """The request to look at; None if nobody can be admitted as things are."""
        oldest, shortest = self._table.queue.oldest, self._table.queue.shortest
        if oldest is None or shortest is None:
            return None
        has_room_for = self._batcher.has_room_for
        if self._is_short(oldest) and now - oldest.short_since > PASSED_OVER_MAX_S:
            held = self._holds.oldest(now)
            if held is not None:
                self._endings.fail(held, expired(held), now)
            shortest = oldest
        for request in (oldest, shortest):
            if not self._is_short(request) and has_room_for(len(request.token_ids)):
                return request
        return None

    def _is_short(self, request: PrefillRequest) -> bool:
        """Whether its pages were not there, and none have come back since."""
        return request.relief_seen == self._account.relief_count

    def _look_at(self, request: PrefillRequest, now: float) -> None:
        tokens, sampling = request.token_ids, request.sampling
        nodes = self._account.match(tokens, sampling)
        found = self._batcher.find_writer(nodes, tokens, reusable_count(tokens, sampling))
        if found is not None:
            leader, shared_count = found
            cached_count = len(nodes) * self._account.groups[0].page_items
            if shared_count - cached_count >= SPARED_SHARE_MIN * (len(tokens) - cached_count):
                self._followers.add(request, leader, shared_count)
                return
        sequence = self._account.open(
            request.request_id, tokens, request.prompt_count, sampling, nodes
        )
        if sequence is None:
            request.short_since = request.short_since or now
            request.relief_seen = self._account.relief_count
            return
        # It grows by the first token; the request keeps what it was asked to compute.
        sequence.token_ids = list(tokens)
        request.sequence = sequence
        request.cached_token_count = sequence.cached_count
        request.scheduled_at = now
        request.advance(PrefillEvent.SCHEDULED)
        self._table.queue.discard(request)
        self._batcher.add(sequence)
