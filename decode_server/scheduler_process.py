"""`python -m decode_server.scheduler_process --config FILE`: the decode server's scheduler."""

from __future__ import annotations

import secrets
import sys

from common.config import LocalPrefill, ServerConfig
from common.prefill_entries import fixed_addresses
from common.runtime import scheduler_loop
from common.runtime.peer_ends import dial
from common.runtime.start import read_process_config
from common.scheduling.facts import Pace, SchedulerLimits, ServerFacts
from common.scheduling.in_flight import IN_FLIGHT_MAX
from decode_server.scheduler import DecodeScheduler


def make_core(facts: ServerFacts, config: ServerConfig) -> DecodeScheduler:
    may_plan_ahead = not (config.disable_overlap_schedule or config.proposal_max)
    limits = SchedulerLimits(
        chunk_token_max=config.chunked_prefill_size,
        running_max=facts.running_max(config.max_running_requests),
        queue_max=config.max_queued_requests,
        has_prefix_cache=not config.disable_radix_cache,
        in_flight_max=IN_FLIGHT_MAX if may_plan_ahead else 1,
        proposal_max=config.proposal_max,
        self_test_interval_s=config.self_test_interval_s,
        pace=Pace(
            config.heartbeat_interval_s,
            config.peer_timeout_s,
            config.stall_s(facts.device),
            config.worker_timeout_s,
        ),
    )
    return DecodeScheduler(
        facts,
        limits,
        fixed_addresses(config.prefill),
        is_local=not config.prefill,
        computes_rests=config.local_prefill is not LocalPrefill.OFF,
        sends=config.returns_caches,
        may_fall_back=config.local_prefill is LocalPrefill.FALLBACK,
        seed=secrets.randbits(64),
    )


if __name__ == "__main__":
    sys.exit(scheduler_loop.run(read_process_config("scheduler"), make_core, dial))
