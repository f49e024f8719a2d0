"""The facts of a server that its scheduler core starts with. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import (
    DEFAULT_BOOTSTRAP_TIMEOUT_S,
    DEFAULT_CPU_STALL_S,
    DEFAULT_HEARTBEAT_INTERVAL_S,
    DEFAULT_MAX_RUNNING_REQUESTS,
    DEFAULT_PEER_TIMEOUT_S,
    DEFAULT_SELF_TEST_INTERVAL_S,
    DEFAULT_WORKER_TIMEOUT_S,
    TransferMode,
    Verify,
)
from common.layout.cache_layout import ServerLayout
from common.prefix_digests import DIGEST_TOKENS
from common.protocol.worker_values import PassTimes, PeerWriter
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.in_flight import IN_FLIGHT_MAX

# A request that does not fit is passed over for smaller ones at most this long; then it is next.
PASSED_OVER_MAX_S = 2.0


NOT_TIMED = PassTimes()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """incarnation: random per process start. page_counts: per page group, the least of all ranks.
    checkpoint_max: of prefixes, whose slots, tails and windows are among these pages.
    sequence_token_max: context length. host_ids, pids: of the worker processes, by rank.
    name, http_address: what peers show of it.
    transfer_mode: how caches may travel, as far as this side is concerned. verify: how much of them
    it wants compared.
    pass_times: what steps took at the start, of the slowest rank.
    digest_tokens, digest_lookahead: of each digest of a prompt's beginnings (see
    prefix_digests.py).
    host_page_counts: per page group, of the tier in host memory; () without one.
    device: what the workers compute on, cpu or cuda.
    earlier_writers: peers of schedulers before this one, over the same workers, that may still
    write into their pages."""

    incarnation: str
    layout: ServerLayout
    layout_bytes: bytes
    page_counts: tuple[int, ...]
    fingerprint: dict[str, str]
    sequence_token_max: int
    eos_token_ids: frozenset[int]
    host_ids: tuple[str, ...]
    pids: tuple[int, ...]
    name: str = ""
    http_address: str = ""
    workers: tuple[dict[str, str], ...] = ()
    transfer_mode: TransferMode = TransferMode.DIRECT
    verify: Verify = Verify.OFF
    checkpoint_max: int = 0
    device: str = "cpu"

    pass_times: PassTimes = NOT_TIMED
    digest_tokens: int = DIGEST_TOKENS
    digest_lookahead: int = 0
    host_page_counts: tuple[int, ...] = ()
    earlier_writers: tuple[PeerWriter, ...] = ()

    @property
    def rank_count(self) -> int:
        return len(self.layout.ranks)

    @property
    def state_count(self) -> int | None:
        """Requests and checkpoints that find their slot and their tails at a time; None if none
        needs any."""
        counts = [
            count
            for group, count in zip(self.layout.groups, self.page_counts, strict=True)
            if not group.live.is_paged
        ]
        return min(counts, default=None)

    def running_max(self, asked: int | None) -> int:
        """Requests that compute at a time, where the settings ask for so many, or for none."""
        wanted = asked or DEFAULT_MAX_RUNNING_REQUESTS
        if self.state_count is None:
            return wanted
        return min(wanted, self.state_count - self.checkpoint_max)


@dataclass(frozen=True, slots=True)
class Pace:
    """How peers are watched, in seconds. A scheduler runs no tensor code: only a frozen, dead or
    unreachable one is silent for timeout_s, several beats, even where engines take all cores.

    stall_s: how long our own engine may stand still in a step. worker_s: how long a worker of ours
    may be silent.
    """

    interval_s: float = DEFAULT_HEARTBEAT_INTERVAL_S
    timeout_s: float = DEFAULT_PEER_TIMEOUT_S
    stall_s: float = DEFAULT_CPU_STALL_S
    worker_s: float = DEFAULT_WORKER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """chunk_token_max: prompt tokens per step. running_max: sequences that compute at a time.
    queue_max: requests that may wait; more are answered 503 at once.
    in_flight_max: steps that may be with the workers; 1 where pipeline stages learn from a step
        what the one before it drew, and where proposals are verified.
    proposal_max: tokens that are proposed ahead of a sequence in a step. guess_count: that are
        guessed behind the first one of a prompt for another server.
    self_test_interval_s: time without a transfer until one is tried, as one is when a peer has
        been connected; 0: never.
    bootstrap_timeout_s: how long half of a routed request waits for a reservation."""

    chunk_token_max: int
    running_max: int
    queue_max: int
    has_prefix_cache: bool = True
    bootstrap_timeout_s: float = DEFAULT_BOOTSTRAP_TIMEOUT_S
    pace: Pace = Pace()
    self_test_interval_s: float = DEFAULT_SELF_TEST_INTERVAL_S
    in_flight_max: int = IN_FLIGHT_MAX
    proposal_max: int = 0
    guess_count: int = 0

    def of_batch(
        self, facts: ServerFacts, sequence_token_max: int, *, is_prompt_only: bool = False
    ) -> BatchLimits:
        """As the batcher wants them."""
        return BatchLimits(
            self.chunk_token_max,
            self.running_max,
            sequence_token_max,
            facts.eos_token_ids,
            self.in_flight_max,
            is_prompt_only,
            self.proposal_max,
            self.guess_count,
        )
