"""What a server takes from the reports of its ranks: counts that every rank can keep."""

from __future__ import annotations

import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.codec import encode_layout
from common.protocol.worker import WorkerReady
from common.runtime.gathered_facts import gather_facts
from common.scheduling.facts import ServerFacts
from tests.worker.test_pools import config_of


def facts_of(ranks: list[tuple[list[int], int]], *lives: Live) -> ServerFacts:
    """ranks: page counts per live rule, and checkpoints, of each."""
    components = tuple(
        CacheComponent(live.kind, (0,), (Segment("head", 1, 8),), live, Shard.REPLICATE, "float32")
        for live in lives
    )
    layout = encode_layout(ServerLayout(components, len(ranks), ((0, 1),), 16))
    ready = {
        rank: WorkerReady(rank, counts, layout, {}, 100, 4096, [], {}, checkpoint_max=checkpoints)
        for rank, (counts, checkpoints) in enumerate(ranks)
    }
    return gather_facts(config_of(), ready)


@pytest.mark.parametrize(
    ("ranks", "checkpoints", "asked", "running"),
    [
        ([([100, 20, 30], 8)], 8, None, 12),
        ([([100, 20, 30], 8)], 8, 4, 4),
        ([([100, 20, 30], 8)], 8, 50, 12),
        ([([100, 20, 30], 0)], 0, None, 20),
        ([([100, 900, 900], 300)], 300, None, 256),
        # Neither takes what the other rank has not.
        ([([100, 20, 30], 10), ([100, 18, 18], 9)], 9, None, 9),
        ([([100, 512, 512], 256), ([90, 5, 5], 2)], 2, None, 3),
    ],
)
def test_requests_and_checkpoints_share_the_states_that_every_rank_has(
    ranks: list[tuple[list[int], int]], checkpoints: int, asked: int | None, running: int
) -> None:
    facts = facts_of(ranks, FULL, SLOT, Live(LiveKind.TAIL, 4))
    assert facts.checkpoint_max == checkpoints
    assert facts.running_max(asked) == running


def test_checkpoints_without_states_bound_no_number_of_requests() -> None:
    facts = facts_of([([100, 50], 256)], FULL, Live(LiveKind.WINDOW, 64))
    assert facts.checkpoint_max == 256
    assert (facts.running_max(None), facts.running_max(7)) == (256, 7)


@pytest.mark.parametrize(("device", "stall_s"), [("cpu", 2.0), ("cuda", 10.0)])
def test_what_the_workers_found_says_how_long_an_engine_may_stand_still(
    device: str, stall_s: float
) -> None:
    component = CacheComponent(
        "full", (0,), (Segment("head", 1, 8),), FULL, Shard.REPLICATE, "float32"
    )
    layout = encode_layout(ServerLayout((component,), 1, ((0, 1),), 16))
    ready = WorkerReady(0, [100], layout, {}, 100, 4096, [], {}, device=device)
    facts = gather_facts(config_of(), {0: ready})
    assert config_of().stall_s(facts.device) == stall_s
