"""What becomes of a request whose transfer brought nothing, or whose time is up.

Another prefill server, this server itself where that is allowed, or one typed error. Knows nothing
of pages. Writes nothing.
"""

from __future__ import annotations

from common.failures import Failure, FailureKind
from common.transfers.incoming_transfer import CacheFailed
from decode_server.decisions import Fail, Retry
from decode_server.request import DecodeRequest

# Transfers of one request that fail in a row before the last failure is passed on.
ATTEMPT_COUNT_MAX = 3


def decide_after(
    request: DecodeRequest, failed: CacheFailed, *, may_fall_back: bool
) -> Retry | Fail:
    """Try again, unless a router's room binds the request to the server that failed.

    may_fall_back: this server may compute the prompt itself.
    """
    failure = failed.failure
    if failure.kind is FailureKind.QUEUE_FULL and failure.is_retryable:
        # The server took others at the same moment. Nothing was tried, so nothing has failed.
        return Retry(request, is_attempt=False)
    if failure.kind is FailureKind.ABORTED:
        # The request that waits here was not aborted; a router would read that as an answer.
        failure = Failure(
            FailureKind.OTHER_HALF_ABORTED, failure.message, is_retryable=failure.is_retryable
        )
    is_unbound = loses_binding(request, failed)
    is_bound = request.bootstrap_link is not None and not is_unbound
    is_retryable = failure.is_retryable or (request.is_held and is_unbound)
    is_last = request.failure_count + 1 >= ATTEMPT_COUNT_MAX
    if not is_retryable or is_bound or (is_last and not may_fall_back):
        return Fail(request, failure)
    return Retry(request, is_computed_here=is_last)


def loses_binding(request: DecodeRequest, failed: CacheFailed) -> bool:
    """Whether any server may compute a request now that was bound to one: its room is used up, or
    what was held for it is lost."""
    if request.bootstrap is None:
        return False
    is_lost = request.is_held and failed.failure.status != 400
    return failed.is_other_half_used or is_lost


def failure_of_late(request: DecodeRequest, ahead_count: int) -> Failure:
    """Its time budget is used up. A request that never began may find room on another server.

    ahead_count: others that wait.
    """
    if request.requested_at or (request.parent is not None and request.parent.requested_at):
        return Failure(FailureKind.TIMED_OUT, "the request's time budget is used up")
    text = f"not begun within the request's time budget: {ahead_count} others wait"
    return Failure(FailureKind.OVERLOADED, text)
