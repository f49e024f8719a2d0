"""What either scheduler answers to FlushCache. Knows nothing of requests but how many are open."""

from __future__ import annotations

from common.protocol.frontend import CallDone, FlushCache
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox


class Flushes:
    """Forgets cached prefixes, unless there are requests, which may be reading them.

    A request that has ended may still be in a step in flight, and what it left may be on its way to
    host memory. Both are waited for, which takes no longer than a step and some copies.
    """

    def __init__(self, account: PageAccount, batcher: Batcher, outbox: Outbox) -> None:
        self._account = account
        self._batcher = batcher
        self._outbox = outbox
        self._waiting: list[FlushCache] = []

    @property
    def is_asked(self) -> bool:
        """Whether one is to be answered."""
        return bool(self._waiting)

    def handle(self, flush: FlushCache, request_count: int) -> None:
        self._waiting.append(flush)
        self.answer(request_count)

    def answer(self, request_count: int) -> None:
        """Answer what can be answered by now."""
        is_read = self._batcher.is_computing or self._account.is_moving
        if is_read and not request_count:
            return
        waiting, self._waiting = self._waiting, []
        for flush in waiting:
            reason = f"{request_count} requests are running" if request_count else ""
            is_done = not request_count and self._account.flush_cache()
            self._outbox.to_frontend(CallDone(flush.call_id, is_done, reason))
