"""What a simulated server tells its scheduler core at the start, and the core itself.

Knows nothing of what is done to the server afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.layout.cache_layout import ServerLayout
from common.layout.component import CacheComponent, Segment, Shard
from common.protocol.codec import encode_layout
from common.protocol.worker_values import PassTimes
from common.scheduling.facts import SchedulerLimits, ServerFacts
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim import releases
from tests.sim.client import DIGEST_TOKENS, EOS
from tests.sim.sim_worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.node import Node


def facts_of(node: Node, predecessor: SimWorker | None) -> ServerFacts:
    """predecessor: its workers, if they lived already for the scheduler before."""
    layout = layout_of(node)
    return ServerFacts(
        incarnation=f"{node.name}-{node.life}",
        layout=layout,
        layout_bytes=encode_layout(layout),
        page_counts=node.page_counts,
        fingerprint=fingerprint_of(node),
        sequence_token_max=512,
        eos_token_ids=frozenset({EOS}),
        host_ids=node.host_ids,
        pids=(node.process_id,) * len(node.host_ids),
        transfer_mode=node.transfer_mode,
        verify=node.verify,
        checkpoint_max=node.checkpoint_max,
        digest_tokens=DIGEST_TOKENS,
        digest_lookahead=node.digest_lookahead,
        pass_times=PassTimes(node.prompt_token_s),
        host_page_counts=host_page_counts(node),
        earlier_writers=tuple(predecessor.transfers.writers.values()) if predecessor else (),
    )


def fingerprint_of(node: Node) -> dict[str, str]:
    named = {"weight_version": str(node.weight_version)} if node.weight_version else {}
    return {"model": "sim", **named}


def limits_of(node: Node) -> SchedulerLimits:
    proposal_max = node.proposal_max if node.role == "decode" else 0
    return SchedulerLimits(
        chunk_token_max=24,
        running_max=node.running_max,
        queue_max=node.queue_max,
        pace=node.pace,
        self_test_interval_s=node.self_test_interval_s,
        bootstrap_timeout_s=node.world.hold_s,
        in_flight_max=1 if proposal_max else node.in_flight_max,
        proposal_max=proposal_max,
        guess_count=node.guess_count if node.role == "prefill" else 0,
        has_prefix_cache=node.has_prefix_cache,
    )


def returns_caches(node: Node) -> bool:
    """The first release knows nothing of caches that go back."""
    return node.returns_caches and node.release > releases.FIRST


def core_of(node: Node, limits: SchedulerLimits) -> PrefillScheduler | DecodeScheduler:
    if node.role == "prefill":
        seed = 1000 * (1 + sum(node.name.encode())) + node.life
        return PrefillScheduler(node.facts, limits, receives=returns_caches(node), seed=seed)
    return DecodeScheduler(
        node.facts,
        limits,
        node.links,
        is_local=node.is_local,
        may_fall_back=node.may_fall_back,
        computes_rests=node.computes_rests,
        sends=returns_caches(node),
        seed=node.world.rng.getrandbits(32),
    )


def layout_of(node: Node) -> ServerLayout:
    """One layer for every live rule, and one that caches nothing, perhaps on its own stage."""
    components = tuple(
        CacheComponent(f"c{i}", (i,), (Segment("head", 1, 8),), live, Shard.SPLIT, "float32")
        for i, live in enumerate(node.world.lives)
    )
    count = len(components)
    stages = ((0, count), (count, count + 1)) if node.has_bare_stage else ((0, count + 1),)
    return ServerLayout(components, 1, stages, node.page_size)


def host_page_counts(node: Node) -> tuple[int, ...]:
    """Of its tier in host memory, in the proportions of its pool."""
    if not node.host_share:
        return ()
    return tuple(max(1, int(count * node.host_share)) for count in node.page_counts)
