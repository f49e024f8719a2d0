"""What a server measures, in Prometheus' terms. Names, labels and buckets follow SGLang's.

The only importer of prometheus_client. Knows nothing of HTTP, of messages or of who measured: it
takes plain values and `RequestTrace`s. Lives in the frontend process.
"""

from __future__ import annotations

from common.config import EngineType
from common.request import RequestTrace


class ServerMetrics:
    """All metrics of one server, in a registry of their own. Not thread-safe beyond scraping."""

    def __init__(self, model_name: str, engine_type: EngineType) -> None:
        self.model_name = model_name
        self.engine_type = engine_type

    def observe_tokens(self, token_count: int, interval_s: float) -> None:
        """`token_count` output tokens arrived `interval_s` after the previous ones."""

    def observe_end(self, trace: RequestTrace, *, is_streaming: bool) -> None:
        """A request of this server's clients has ended, well or not."""

    def observe_hand_over(self, trace: RequestTrace) -> None:
        """A hand-over that only the scheduler knew of has ended (prefill server)."""
