"""Start-up: the reports of all workers as one record of the server. Knows no sockets."""

from __future__ import annotations

import logging
import os
import secrets

from common.config import ServerConfig
from common.protocol.codec import decode_layout
from common.protocol.frontend import ServerInfo
from common.protocol.worker import WorkerReady
from common.protocol.worker_values import PassTimes, PeerWriter
from common.request_bounds import TOKEN_COUNT_MAX
from common.scheduling.facts import ServerFacts

log = logging.getLogger(__name__)


def gather_facts(config: ServerConfig, workers: dict[int, WorkerReady]) -> ServerFacts:
    """workers: by rank; they must agree on everything but their pages."""
    ordered = [worker for _, worker in sorted(workers.items())]
    first = ordered[0]
    for worker in ordered[1:]:
        assert worker.layout == first.layout and worker.fingerprint == first.fingerprint
    page_counts = tuple(map(min, *(w.page_counts for w in ordered), first.page_counts))
    host_counts = tuple(map(min, *(w.host_page_counts for w in ordered), first.host_page_counts))
    return ServerFacts(
        incarnation=secrets.token_hex(8),
        layout=decode_layout(first.layout),
        layout_bytes=first.layout,
        page_counts=page_counts,
        fingerprint=first.fingerprint,
        sequence_token_max=min(config.context_length or first.context_length, TOKEN_COUNT_MAX),
        eos_token_ids=frozenset(first.eos_token_ids),
        host_ids=tuple(worker.host_id for worker in ordered),
        pids=tuple(worker.pid for worker in ordered),
        name=config.name or config.http_address,
        http_address=config.http_address,
        workers=tuple(worker.describe for worker in ordered),
        transfer_mode=config.transfer_mode,
        verify=config.verify_transfer,
        host_page_counts=host_counts,
        digest_lookahead=config.digest_lookahead,
        earlier_writers=_earlier_writers(ordered),
        device=first.device,
        checkpoint_max=min(worker.checkpoint_max for worker in ordered),
        pass_times=PassTimes(
            max(worker.pass_times.prompt_token_s for worker in ordered),
            max(worker.pass_times.decode_s for worker in ordered),
        ),
    )


def _earlier_writers(workers: list[WorkerReady]) -> tuple[PeerWriter, ...]:
    """Each once, whichever ranks it could write to."""
    found = {one.incarnation: one for worker in workers for one in worker.writers}
    return tuple(found.values())


def describe_server(
    facts: ServerFacts, request_token_max: int, running_max: int, workers: dict[int, WorkerReady]
) -> ServerInfo:
    """The message that announces a ready server to its frontend. workers: by rank."""
    first = workers[0]
    return ServerInfo(
        token_capacity=request_token_max,
        request_token_max=request_token_max,
        running_max=running_max,
        vocab_size=first.vocab_size,
        eos_token_ids=first.eos_token_ids,
        fingerprint=first.fingerprint,
        workers=[worker.describe for _, worker in sorted(workers.items())],
        incarnation=facts.incarnation,
        pid=os.getpid(),
        weights=first.weights,
    )


def log_ready(config: ServerConfig, facts: ServerFacts, running_max: int) -> None:
    is_bound_by_slots = config.max_running_requests is None and facts.state_count is not None
    log.info(
        "all %d workers are ready: incarnation %s, %s pages, %d requests at a time%s, "
        "%d checkpoints of prefixes",
        config.rank_count,
        facts.incarnation,
        list(facts.page_counts),
        running_max,
        ", as many as there are slots" if is_bound_by_slots else "",
        facts.checkpoint_max,
    )
