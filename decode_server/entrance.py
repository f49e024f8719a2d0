"""Which requests are taken, when they come.

Knows nothing of pages or peers. Writes nothing.
"""

from __future__ import annotations

from common.failures import Failure, FailureKind
from common.protocol.frontend import Submit
from decode_server.decisions import Fail
from decode_server.request import why_misfit
from decode_server.requests import Requests


class Entrance:
    """queue_max: requests that may wait. is_local: this server computes all prompts."""

    def __init__(
        self, requests: Requests, queue_max: int, request_token_max: int, *, is_local: bool
    ) -> None:
        self._requests = requests
        self._queue_max = queue_max
        self._request_token_max = request_token_max
        self._is_local = is_local

    def check(self, submit: Submit, now: float) -> Failure | Fail | None:
        """Why a request is not taken, or who has to make room for it; None if it is taken. One
        that would wait longer than it may is told so at once, and when to come back."""
        misfit = why_misfit(submit, self._request_token_max, is_local=self._is_local)
        if misfit:
            return Failure(FailureKind.BAD_REQUEST, misfit)
        before_count = self._requests.queue.count_before(submit.claim)
        wait_s = self._requests.drain_rate.wait_s(before_count, now)
        last = None
        waiting_count = self._requests.waiting_count
        text = f"queue full: {waiting_count} requests are waiting"
        if waiting_count >= self._queue_max:
            last = self._requests.queue.displaced_by(submit.claim)
            if last is None or not (last.has_client or last.children):
                return Failure(FailureKind.QUEUE_FULL, text, retry_after_s=wait_s or 0.0)
        if wait_s is not None and wait_s > submit.budget_s:
            late = (
                f"{before_count} requests are waiting, which takes about {wait_s:.0f} s: "
                f"this one may take {submit.budget_s:g} s"
            )
            late_s = wait_s - submit.budget_s
            return Failure(FailureKind.OVERLOADED, late, retry_after_s=late_s)
        if last is None:
            return None
        text += ", and one that has just come is before this one"
        return Fail(last, Failure(FailureKind.QUEUE_FULL, text, retry_after_s=wait_s or 0.0))
