"""One record of what all workers of a server said of themselves. Knows nothing of sockets."""

from __future__ import annotations

import secrets

from common.config import ServerConfig
from common.protocol.codec import decode_layout
from common.protocol.worker import WorkerReady
from common.request_bounds import TOKEN_COUNT_MAX
from common.scheduling.facts import ServerFacts


def gather_facts(config: ServerConfig, workers: dict[int, WorkerReady]) -> ServerFacts:
    """workers: by rank; they must agree on everything but their pages."""
    ordered = [worker for _, worker in sorted(workers.items())]
    first = ordered[0]
    for worker in ordered[1:]:
        assert worker.layout == first.layout and worker.fingerprint == first.fingerprint
    page_counts = tuple(
        min(counts) for counts in zip(*(w.page_counts for w in ordered), strict=True)
    )
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
    )
