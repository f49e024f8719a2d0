"""How many pages a rank takes: what was asked for, what fits, and what is of any use."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from common.config import DEFAULT_MAX_RUNNING_REQUESTS, Role, ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import ConfigError
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import gqa_components
from common.worker.pools import (
    HOST_POOL_NBYTES_MAX,
    FreeMemory,
    check_cuda_segment,
    decide_pool_size,
    free_nbytes,
    page_counts_for,
)

MIB = 1 << 20
PLENTY = FreeMemory(1 << 40, 1 << 40, 1 << 40)


def gqa_layout(page_size: int = 16) -> RankLayout:
    """64 KiB per page of 16 tokens."""
    components = gqa_components(layer_count=4, kv_head_count=2, head_dim=64, dtype="float32")
    return ServerLayout(components, 1, ((0, 4),), page_size).rank(0, 0)


def config_of(**changes: object) -> ServerConfig:
    values: dict[str, object] = {
        "role": Role.PREFILL,
        "model_path": "/model",
        "tokenizer_path": "/model",
        "served_model_name": "m",
        "port": 1,
        **changes,
    }
    return ServerConfig(**values)  # type: ignore[arg-type]


def page_counts_of(
    layout: RankLayout, config: ServerConfig, context_length: int, free: FreeMemory
) -> list[int]:
    """Without checkpoints, unless the settings say how many there are to be."""
    if config.max_checkpoints is None:
        config = structs.replace(config, max_checkpoints=0)
    return decide_pool_size(layout, config, context_length, free).page_counts


@pytest.mark.parametrize(("tokens", "pages"), [(16, 1), (17, 2), (1600, 100), (1, 1)])
def test_what_was_asked_for_is_taken_in_whole_pages(tokens: int, pages: int) -> None:
    config = config_of(max_total_tokens=tokens)
    assert page_counts_of(gqa_layout(), config, 4096, PLENTY) == [pages]


@pytest.mark.parametrize(
    ("now", "shared", "named"),
    [
        (100 * 65536, 1 << 40, "6553600 are free$"),
        (1 << 40, 100 * 65536, "6553600 are free in /dev/shm"),
        (101 * 65536 - 1, None, "6619135 are free$"),
    ],
)
def test_more_than_there_is_can_not_be_asked_for(now: int, shared: int | None, named: str) -> None:
    config = config_of(max_total_tokens=1600)  # 100 pages and the scratch page
    with pytest.raises(ConfigError, match=f"--max-total-tokens 1600: needs 6619136 .*{named}"):
        page_counts_of(gqa_layout(), config, 4096, FreeMemory(now, now, shared))
    fits = FreeMemory(101 * 65536, 101 * 65536, None)
    assert page_counts_of(gqa_layout(), config, 4096, fits) == [100]


@pytest.mark.parametrize(
    ("free", "budget"),
    [
        (FreeMemory(200 * MIB, 200 * MIB, None), 100 * MIB),
        (FreeMemory(200 * MIB, 200 * MIB, 60 * MIB), 30 * MIB),
        (FreeMemory(1 << 40, 1 << 40, None), HOST_POOL_NBYTES_MAX),
    ],
)
def test_unasked_a_pool_leaves_half_of_the_host_and_takes_all_of_its_share(
    free: FreeMemory, budget: int
) -> None:
    layout = gqa_layout()
    counts = page_counts_of(layout, config_of(), 1 << 30, free)
    assert sum(KvPool.buffer_nbytes(layout, counts)) <= budget
    assert sum(KvPool.buffer_nbytes(layout, [counts[0] + 1])) > budget


def test_on_a_gpu_weights_and_pool_share_the_fraction_of_what_was_free() -> None:
    layout = gqa_layout()
    config = config_of(device="cuda", mem_fraction_static=0.75)
    free = FreeMemory(before_nbytes=1000 * MIB, now_nbytes=600 * MIB, shared_nbytes=None)
    counts = page_counts_of(layout, config, 1 << 30, free)
    nbytes = sum(KvPool.buffer_nbytes(layout, counts))
    assert 350 * MIB - 65536 < nbytes <= 350 * MIB


def test_recorded_passes_take_their_share_before_the_pool_does() -> None:
    layout = gqa_layout()
    config = config_of(device="cuda", mem_fraction_static=0.75)
    free = FreeMemory(1000 * MIB, 600 * MIB, None, recorded_nbytes=50 * MIB)
    counts = page_counts_of(layout, config, 1 << 30, free)
    nbytes = sum(KvPool.buffer_nbytes(layout, counts))
    assert 300 * MIB - 65536 < nbytes <= 300 * MIB
    asked = config_of(device="cuda", max_total_tokens=16 * 16 * 560)  # 560 MiB of 600
    with pytest.raises(ConfigError, match=f" {550 * MIB} are free"):
        page_counts_of(layout, asked, 4096, free)
    crowded = FreeMemory(1000 * MIB, 300 * MIB, None, recorded_nbytes=50 * MIB)
    said = f"weights take {700 * MIB} and recorded decode passes {50 * MIB} bytes .*-max-bs, or end"
    with pytest.raises(ConfigError, match=said):
        page_counts_of(layout, config, 4096, crowded)


@pytest.mark.parametrize("now", [300, 249, 100])
def test_weights_that_leave_a_gpu_no_page_say_which_flag_gives_room(now: int) -> None:
    config = config_of(device="cuda", mem_fraction_static=0.7)
    free = FreeMemory(1000 * MIB, now * MIB, None)
    said = (
        rf"no memory for a KV pool: weights take {(1000 - now) * MIB} bytes of the "
        rf"{int(1000 * MIB * 0.7)} that --mem-fraction-static 0\.7 allows .*raise it"
    )
    with pytest.raises(ConfigError, match=said):
        page_counts_of(gqa_layout(), config, 4096, free)


def test_no_more_pages_than_all_running_requests_could_fill() -> None:
    config = config_of(max_running_requests=3)
    assert page_counts_of(gqa_layout(), config, 160, PLENTY) == [30]


@pytest.mark.parametrize("nbytes", [0, 65536, 3 * 65536])
def test_memory_without_room_for_a_page_ends_the_start(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"no memory for a KV pool: {nbytes // 2} bytes"):
        page_counts_of(gqa_layout(), config_of(), 4096, FreeMemory(nbytes, nbytes, None))


def test_every_live_rule_gets_the_pages_its_requests_can_touch() -> None:
    def component(name: str, live: Live) -> CacheComponent:
        return CacheComponent(name, (0,), (Segment("head", 1, 8),), live, Shard.SPLIT, "float32")

    lives = (
        FULL,
        Live(LiveKind.WINDOW, 20),
        Live(LiveKind.BLOCK, 4),
        Live(LiveKind.TAIL, 4, 2),
        Live(LiveKind.SLOT),
    )
    components = tuple(component(live.kind, live) for live in lives)
    layout = ServerLayout(components, 1, ((0, 1),), 8).rank(0, 0)
    counts = page_counts_for(layout, token_count=1000, request_count=5)
    # Oracle: the most pages any 5 requests that share 1000 tokens touch, and any single one.
    for group, count in zip(layout.server.groups, counts, strict=True):
        assert count >= group.page_count(1000)
        assert count >= 5 * max(group.page_count(n) for n in range(1, 201))
    assert counts == [125, 20, 125, 5, 5]


def slot_layout() -> RankLayout:
    """1 MiB per slot, and 4 KiB per page of 16 tokens."""
    components = (
        CacheComponent("k", (0,), (Segment("head", 1, 256),), FULL, Shard.SPLIT, "float32"),
        CacheComponent("s", (1,), (Segment("head", 1, MIB),), SLOT, Shard.SPLIT, "float32"),
    )
    return ServerLayout(components, 1, ((0, 2),), 16).rank(0, 0)


def free_of(nbytes: int) -> FreeMemory:
    """So that half of it, which may be used, is `nbytes`."""
    return FreeMemory(2 * nbytes, 2 * nbytes, None)


def test_slots_that_were_asked_for_come_out_of_the_budget_before_tokens_do() -> None:
    layout = slot_layout()
    for asked in (1, 9, 18):
        config = config_of(max_running_requests=asked)
        pages, slots = page_counts_of(layout, config, 1 << 30, free_of(20 * MIB))
        assert slots == asked
        assert 20 * MIB - 4096 < sum(KvPool.buffer_nbytes(layout, [pages, slots])) <= 20 * MIB


def test_unasked_slots_take_half_of_the_budget_at_most_and_tokens_the_rest() -> None:
    layout = slot_layout()
    for budget in (20 * MIB, 200 * MIB):
        pages, slots = page_counts_of(layout, config_of(), 1 << 30, free_of(budget))
        assert (slots + 1) * MIB == budget // 2
        assert budget - 4096 < sum(KvPool.buffer_nbytes(layout, [pages, slots])) <= budget


def test_no_more_slots_than_the_default_of_running_requests_are_made_unasked() -> None:
    _, slots = page_counts_of(slot_layout(), config_of(), 1 << 30, free_of(700 * MIB))
    assert slots == DEFAULT_MAX_RUNNING_REQUESTS


def test_a_pool_too_small_for_two_slots_has_one_and_the_tokens_still_fit() -> None:
    pages, slots = page_counts_of(slot_layout(), config_of(), 1 << 30, free_of(3 * MIB))
    assert slots == 1 and pages == MIB // 4096 - 1


def test_slots_share_the_memory_also_where_the_tokens_are_given() -> None:
    config = config_of(max_total_tokens=1600)
    assert page_counts_of(slot_layout(), config, 4096, free_of(20 * MIB)) == [100, 9]


@pytest.mark.parametrize(
    ("tokens", "limit", "fitting"),
    # A MiB for the scratch slot and less than one for the pages; told tokens may take all that is
    # free, others half of it.
    [(None, 20 * MIB, "1..18 beside 16 tokens"), (1600, 40 * MIB, "1..38 beside 1600 tokens")],
)
def test_too_many_slots_for_the_memory_are_refused_with_the_size_of_each(
    tokens: int | None, limit: int, fitting: str
) -> None:
    config = config_of(max_running_requests=60, max_total_tokens=tokens)
    complaint = f"--max-running-requests 60: the slot of a request takes {MIB} bytes and {limit} "
    with pytest.raises(ConfigError, match=f"^{complaint}bytes may be used; must be in {fitting}$"):
        page_counts_of(slot_layout(), config, 4096, free_of(20 * MIB))


@pytest.mark.parametrize("asked", [None, 1, 20])
def test_memory_without_room_for_one_slot_ends_the_start(asked: int | None) -> None:
    config = config_of(max_running_requests=asked)
    with pytest.raises(ConfigError, match="no memory for a KV pool: 1048576 bytes may be used"):
        page_counts_of(slot_layout(), config, 4096, free_of(MIB))


def test_free_memory_of_the_host_is_what_the_kernel_says() -> None:
    assert 0 < free_nbytes(torch.device("cpu")) < 1 << 50


def segment_of(start: int, **more: object) -> dict[str, object]:
    return {"address": start, "total_size": 100, **more}


def test_a_pool_in_expandable_segments_is_refused() -> None:
    segments = [segment_of(0), segment_of(100, is_expandable=True)]
    with pytest.raises(
        ConfigError, match=r"PYTORCH_ALLOC_CONF, .*: expandable_segments:True: must be"
    ):
        check_cuda_segment(150, segments)


@pytest.mark.parametrize("address", [99, 200])
def test_expandable_segments_of_others_are_no_concern(address: int) -> None:
    segments = [
        segment_of(0, is_expandable=False),
        segment_of(100, is_expandable=True),
        segment_of(200),
    ]
    check_cuda_segment(address, segments)
