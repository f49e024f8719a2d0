"""What every route of the frontend works with. Made once at start, never replaced.

Knows nothing of routes. The routes own no state but what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock
from common.config import ServerConfig
from common.frontend.bodies.reader import BodyReader
from common.frontend.bodies.sample import Sample
from common.frontend.peers.sources import PeerSources
from common.frontend.requests.draining import DrainOrder
from common.frontend.requests.fleet import Fleet
from common.frontend.requests.relay import Relays
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.frontend.requests.scheduler_client import SchedulerClient
from common.frontend.text.grammar_check import GrammarCheck
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer
from common.metrics.server import ServerMetrics
from common.request import Bootstrap, SamplingParams


@dataclass(frozen=True, slots=True)
class FrontendContext:
    """started_wall_s: when this process started, in seconds since 1970. parsers: how the model
    writes reasoning and calls."""

    config: ServerConfig
    scheduler: SchedulerClient
    peers: PeerSources
    metrics: ServerMetrics
    tokenizer: Tokenizer
    bodies: BodyReader
    grammars: GrammarCheck
    clock: Clock
    started_wall_s: float
    version: str
    fleet: Fleet
    relays: Relays
    drain_order: DrainOrder
    parsers: Parsers

    async def check_grammars(self, samples: Sequence[Sample]) -> None:
        """Raises: RequestError if one of them can't be followed."""
        await self.grammars.check(samples, self.scheduler.server_info)

    def submit(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        rid: str,
        budget_s: float | None = None,
        bootstrap: Bootstrap | None = None,
        is_streaming: bool = False,
        is_measured: bool = True,
        trace_parent: str = "",
        prefix_digests: bytes = b"",
    ) -> RequestHandle:
        """Send a validated request. budget_s: what it may take, if less than configured.

        Raises: RequestError, see `SchedulerClient.submit_samples`. The limits that a request is
        checked against are in `scheduler.server_info`.
        """
        budget_s = self.config.request_timeout_s if budget_s is None else budget_s
        asked = Asked(token_ids, sampling, budget_s, bootstrap, prefix_digests, trace_parent)
        (handle,) = self.scheduler.submit_samples(
            asked,
            [SampleId(rid, sampling.seed)],
            is_streaming=is_streaming,
            is_measured=is_measured,
        )
        return handle
