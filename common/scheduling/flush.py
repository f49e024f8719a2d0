"""What either scheduler answers to FlushCache. Knows nothing of requests but how many are open."""

from __future__ import annotations

from common.protocol.frontend import FlushCache, FlushDone
from common.scheduling.sequence import PageAccount


def answer_flush(flush: FlushCache, account: PageAccount, request_count: int) -> FlushDone:
    """Forgets cached prefixes, unless there are requests, which may be reading them."""
    if request_count:
        return FlushDone(flush.call_id, False, f"{request_count} requests are running")
    return FlushDone(flush.call_id, account.flush_cache(), "")
