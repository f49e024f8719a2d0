"""Who is computed next, and whether its pages fit.

Knows nothing of what becomes of a request after it was admitted.
"""

from __future__ import annotations

from common.scheduling.batcher import Batcher
from common.scheduling.sequence import PageAccount, Sequence
from common.scheduling.transitions import PrefillEvent
from prefill_server.endings import Endings
from prefill_server.holds import Holds, expired
from prefill_server.request import PrefillRequest
from prefill_server.requests import RequestTable

# A request that does not fit is passed over for smaller ones at most this long; then it is next.
PASSED_OVER_MAX_S = 2.0


class Admission:
    """Moves requests out of the queue."""

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

    @property
    def load_tokens(self) -> int:
        """Tokens that are asked for and not computed yet."""
        queued = sum(len(request.token_ids) for request in self._table.queue.values())
        return queued + self._batcher.uncomputed_token_count

    def admit(self, now: float) -> None:
        """Start whoever fits, in order of arrival; nobody passes a request that waited too long."""
        for request in list(self._table.queue.values()):
            if not self._batcher.has_room:
                break
            sequence = self._open(request)
            if sequence is None:
                if now - request.queued_at > PASSED_OVER_MAX_S:
                    oldest = self._holds.oldest(now)
                    if oldest is not None:
                        self._endings.fail(oldest, expired(oldest), now)
                    break
                continue
            request.sequence = sequence
            request.cached_token_count = sequence.cached_count
            request.scheduled_at = now
            request.advance(PrefillEvent.SCHEDULED)
            del self._table.queue[request.request_id]
            self._batcher.add(sequence)

    def _open(self, request: PrefillRequest) -> Sequence | None:
        """The sequence grows by the first token; the request keeps what it was asked to compute."""
        tokens = list(request.token_ids)
        return self._account.open(
            request.request_id, tokens, request.prompt_count, request.sampling
        )
