"""`python -m prefill_server.scheduler_process --config FILE`: the prefill server's scheduler."""

from __future__ import annotations

import secrets
import sys

from common.config import ServerConfig
from common.runtime import scheduler_loop
from common.runtime.peer_ends import listen
from common.runtime.start import read_process_config
from common.scheduling.facts import Pace, SchedulerLimits, ServerFacts
from common.scheduling.in_flight import IN_FLIGHT_MAX
from prefill_server.scheduler import PrefillScheduler


def make_core(facts: ServerFacts, config: ServerConfig) -> PrefillScheduler:
    limits = SchedulerLimits(
        chunk_token_max=config.chunked_prefill_size,
        running_max=facts.running_max(config.max_running_requests),
        queue_max=config.max_queued_requests,
        has_prefix_cache=not config.disable_radix_cache,
        in_flight_max=1 if config.disable_overlap_schedule else IN_FLIGHT_MAX,
        guess_count=config.proposal_max if config.speculative_algorithm.has_draft else 0,
        pace=Pace(
            config.heartbeat_interval_s,
            config.peer_timeout_s,
            config.stall_s(facts.device),
            config.worker_timeout_s,
        ),
        bootstrap_timeout_s=config.bootstrap_timeout_s,
    )
    receives, seed = config.returns_caches, secrets.randbits(64)
    return PrefillScheduler(facts, limits, receives=receives, seed=seed)


if __name__ == "__main__":
    sys.exit(scheduler_loop.run(read_process_config("scheduler"), make_core, listen))
