"""Counts the tokens of one message for the metrics, together: most of a step have the same pace."""

from __future__ import annotations

from common.frontend.requests.request_handle import RequestHandle
from common.metrics.server import ServerMetrics


class TokenPace:
    """Owner of what has been noted and not told."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._noted: dict[tuple[int, float | None, bool], int] = {}

    def note(self, handle: RequestHandle, token_count: int, now: float) -> None:
        """So many tokens have come for a request."""
        interval_s = None if handle.tokens_at is None else now - handle.tokens_at
        handle.tokens_at = now
        key = (token_count, interval_s, handle.is_streaming)
        self._noted[key] = self._noted.get(key, 0) + 1

    def tell(self) -> None:
        """The message is over."""
        for (token_count, interval_s, is_streaming), request_count in self._noted.items():
            self._metrics.observe_tokens(
                token_count, interval_s, is_streaming=is_streaming, request_count=request_count
            )
        self._noted.clear()
