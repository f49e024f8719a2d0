"""How many checkpoints of prefixes get pages of their own: as many as asked for, or as fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import DEFAULT_MAX_RUNNING_REQUESTS, ReturnCache, Role, ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import ConfigError
from common.layout.cache_layout import PageGroup, RankLayout, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.worker.checkpoint_counts import share_out, window_page_max
from common.worker.pools import FreeMemory, PoolSize, decide_pool_size, page_counts_for
from tests.worker.test_pools import MIB, config_of, free_of, gqa_layout, slot_layout

LIVES = (
    FULL,
    Live(LiveKind.WINDOW, 20),
    Live(LiveKind.BLOCK, 4),
    Live(LiveKind.TAIL, 4, 2),
    SLOT,
)
ENDLESS = 1 << 30
"""A context length that bounds no pool."""


def layout_of(lives: tuple[Live, ...], unit_nbytes: int = 8, page_size: int = 8) -> RankLayout:
    components = tuple(
        CacheComponent(
            live.kind, (0,), (Segment("head", 1, unit_nbytes),), live, Shard.SPLIT, "float32"
        )
        for live in lives
    )
    return ServerLayout(components, 1, ((0, 1),), page_size).rank(0, 0)


def window_layout() -> RankLayout:
    """16 KiB for 16 tokens of either group; a window of 1000 tokens takes 64 pages: 1 MiB."""
    return layout_of((FULL, Live(LiveKind.WINDOW, 1000)), 1024, 16)


def size_of(layout: RankLayout, nbytes: int, **settings: object) -> PoolSize:
    """Of a pool that may take so many bytes."""
    return decide_pool_size(layout, config_of(**settings), ENDLESS, free_of(nbytes))


def nbytes_of(layout: RankLayout, size: PoolSize) -> int:
    return sum(KvPool.buffer_nbytes(layout, size.page_counts))


# ---- pages of a checkpoint -----------------------------------------------------------------------


def test_checkpoints_get_what_of_a_sequence_is_not_whole_pages_of_all_its_tokens() -> None:
    layout = layout_of(LIVES)
    without = page_counts_for(layout, 1000, 5)
    beside = page_counts_for(layout, 1000, 5, checkpoint_count=3)
    added = [more - fewer for more, fewer in zip(beside, without, strict=True)]
    assert added == [0, 3 * 4, 0, 3, 3]
    # Oracle: the most pages that what is live after any number of tokens lies in.
    window = layout.server.groups[1]
    assert max(map(window.page_count, range(200))) == 4


def test_windows_of_checkpoints_are_copies_beside_the_pages_of_all_tokens() -> None:
    """Requests share two pages of tokens here, and each checkpoint still has a window."""
    counts = page_counts_for(layout_of(LIVES), 16, request_count=5, checkpoint_count=3)
    assert counts == [2, 2 + 3 * 4, 2, 8, 8]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24, 37])
def test_a_window_has_room_wherever_it_starts_in_a_page(size: int) -> None:
    group = PageGroup(Live(LiveKind.WINDOW, size), 8, ())
    ends = range(1, 200)
    assert max(group.page_end(n) - group.page_first(n) for n in ends) <= window_page_max(group)


# ---- as many as there is room for ----------------------------------------------------------------


@pytest.mark.parametrize("budget", [6, 8, 20, 21, 200])
def test_unasked_requests_and_checkpoints_halve_the_share_of_slots(budget: int) -> None:
    layout = slot_layout()  # 1 MiB per slot
    size = size_of(layout, budget * MIB)
    slots = size.page_counts[1]
    assert slots + 1 == budget // 2, "with the scratch page"
    assert size.checkpoint_max == slots // 2
    assert budget * MIB - 4096 < nbytes_of(layout, size) <= budget * MIB


def test_unasked_there_are_no_more_requests_and_checkpoints_than_the_default_of_both() -> None:
    config = config_of(device="cuda", mem_fraction_static=0.5)
    free = FreeMemory(8000 * MIB, 8000 * MIB, None)
    size = decide_pool_size(slot_layout(), config, ENDLESS, free)
    assert size.checkpoint_max == DEFAULT_MAX_RUNNING_REQUESTS
    assert size.page_counts[1] == 2 * DEFAULT_MAX_RUNNING_REQUESTS


@pytest.mark.parametrize("budget", [3 * MIB, 4 * MIB])
def test_a_pool_with_room_for_one_slot_keeps_it_for_a_request(budget: int) -> None:
    size = size_of(slot_layout(), budget)
    assert (size.page_counts[1], size.checkpoint_max) == (1, 0)
    assert size.checkpoints == "none: no memory for one"


@pytest.mark.parametrize(("asked", "checkpoints"), [(1, 1), (3, 3), (9, 2), (15, 1), (18, 0)])
def test_beside_requests_that_were_asked_for_a_quarter_of_the_rest_is_for_checkpoints(
    asked: int, checkpoints: int
) -> None:
    """Of 20 slots, one of them scratch; and never more than there are requests."""
    size = size_of(slot_layout(), 20 * MIB, max_running_requests=asked)
    assert (size.page_counts[1], size.checkpoint_max) == (asked + checkpoints, checkpoints)


@pytest.mark.parametrize("budget", [3, 8, 40, 400])
def test_windows_of_checkpoints_leave_three_quarters_to_tokens(budget: int) -> None:
    layout = window_layout()
    size = size_of(layout, budget * MIB)
    assert size.checkpoint_max == budget // 4
    full, window = size.page_counts
    assert window == full + 64 * size.checkpoint_max, "no bound but the tokens'"
    assert 2 * full * 16384 >= (3 * budget * MIB) // 4 - 4 * 16384


@pytest.mark.parametrize(("asked", "count"), [(None, 256), (3, 3), (4096, 4096)])
def test_where_all_pages_are_those_of_tokens_there_are_as_many_as_requests(
    asked: int | None, count: int
) -> None:
    with_them = size_of(gqa_layout(), 50 * MIB, max_running_requests=asked)
    without = size_of(gqa_layout(), 50 * MIB, max_running_requests=asked, max_checkpoints=0)
    assert with_them.checkpoint_max == count
    assert with_them.page_counts == without.page_counts


@pytest.mark.parametrize(
    ("tokens_mib", "slots", "checkpoints"),
    [(29, 9, 4), (30, 7, 2), (32, 6, 1), (33, 5, 0)],
)
def test_unasked_checkpoints_give_way_to_tokens_that_were_asked_for(
    tokens_mib: int, slots: int, checkpoints: int
) -> None:
    """20 MiB may be used, which makes 9 slots with 4 for checkpoints; told tokens may take all of
    the 40 that are free."""
    config = config_of(max_total_tokens=tokens_mib * MIB // 4096 * 16)
    size = decide_pool_size(slot_layout(), config, ENDLESS, free_of(20 * MIB))
    assert (size.page_counts[1], size.checkpoint_max) == (slots, checkpoints)


# ---- how many there are to be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"disable_radix_cache": True}, "none: --disable-radix-cache"),
        ({"max_checkpoints": 0}, "none: --max-checkpoints 0"),
        (
            {
                "role": Role.DECODE,
                "prefill": ("p:1",),
                "local_prefill": "off",
                "return_cache": ReturnCache.OFF,
            },
            "none: no prompt is computed here, and no cache returned: --local-prefill off",
        ),
    ],
)
@pytest.mark.parametrize("layout", [slot_layout(), gqa_layout(), window_layout()])
def test_where_no_prefix_is_continued_nothing_is_kept_for_checkpoints(
    layout: RankLayout, settings: dict[str, object], why: str
) -> None:
    size = size_of(layout, 20 * MIB, **settings)
    assert (size.checkpoint_max, size.checkpoints) == (0, why)
    request_count = share_out(layout, config_of(**settings), 20 * MIB).request_count
    assert request_count == (9 if layout == slot_layout() else DEFAULT_MAX_RUNNING_REQUESTS)


@pytest.mark.parametrize(
    "settings",
    [
        {"role": Role.PREFILL, "local_prefill": "off"},
        {"role": Role.DECODE, "local_prefill": "off"},
        {"role": Role.DECODE, "prefill": ("p:1",), "local_prefill": "fallback"},
        {"role": Role.DECODE, "prefill": ("p:1",), "local_prefill": "off", "max_checkpoints": 4},
    ],
)
def test_who_computes_prompts_or_was_asked_has_checkpoints(settings: dict[str, object]) -> None:
    assert size_of(slot_layout(), 20 * MIB, **settings).checkpoint_max == 4


@pytest.mark.parametrize(("asked", "requests"), [(0, 9), (1, 8), (4, 7), (16, 1), (17, 1)])
def test_checkpoints_that_were_asked_for_come_before_the_share_of_requests(
    asked: int, requests: int
) -> None:
    layout = slot_layout()
    size = size_of(layout, 20 * MIB, max_checkpoints=asked)
    assert (size.page_counts[1], size.checkpoint_max) == (requests + asked, asked)
    assert size.page_counts[0] >= 1 and nbytes_of(layout, size) <= 20 * MIB


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"max_checkpoints": 300}, "0..17 beside 16 tokens"),
        ({"max_checkpoints": 18}, "0..17 beside 16 tokens"),
        ({"max_checkpoints": 18, "max_running_requests": 9}, "0..9 beside 16 tokens"),
        ({"max_checkpoints": 60, "max_total_tokens": 1600}, "0..37 beside 1600 tokens"),
    ],
)
def test_too_many_checkpoints_for_the_memory_are_refused_with_the_size_of_each(
    settings: dict[str, object], allowed: str
) -> None:
    layout, asked = slot_layout(), settings["max_checkpoints"]
    with pytest.raises(ConfigError) as refused:
        size_of(layout, 20 * MIB, **settings)
    limit = 40 * MIB if "max_total_tokens" in settings else 20 * MIB
    assert str(refused.value) == (
        f"--max-checkpoints {asked}: one takes {MIB} bytes and {limit} bytes may be used; "
        f"must be in {allowed}"
    )
    most = int(allowed.removeprefix("0..").split()[0])
    assert size_of(layout, 20 * MIB, **settings | {"max_checkpoints": most}).checkpoint_max == most


def test_requests_that_have_no_room_even_without_checkpoints_are_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--max-running-requests 60: .* in 1\.\.18 beside"):
        size_of(slot_layout(), 20 * MIB, max_running_requests=60, max_checkpoints=5)


@settings(max_examples=200, deadline=None)
@given(
    lives=st.lists(st.sampled_from(LIVES), min_size=1, unique=True),
    unit_nbytes=st.sampled_from([4, 400, 40_000]),
    budget=st.integers(0, 20 * MIB),
    requests=st.none() | st.integers(1, 300),
    tokens=st.none() | st.integers(16, 4000),
)
def test_checkpoints_never_cost_a_server_its_start(
    lives: list[Live], unit_nbytes: int, budget: int, requests: int | None, tokens: int | None
) -> None:
    """Where a server starts without them it starts with them, and they have the pages they need."""
    layout = layout_of(tuple(lives), unit_nbytes)
    config = config_of(max_running_requests=requests, max_total_tokens=tokens)
    free = free_of(budget)

    def decide(config: ServerConfig) -> PoolSize | None:
        try:
            return decide_pool_size(layout, config, 4096, free)
        except ConfigError:
            return None

    size = decide(config)
    if size is None:
        without = config_of(
            max_running_requests=requests, max_total_tokens=tokens, max_checkpoints=0
        )
        assert decide(without) is None
        return
    assert nbytes_of(layout, size) <= (budget if tokens is None else 2 * budget)
    assert (size.checkpoint_max == 0) == size.checkpoints.startswith("none: ")
    for group, count in zip(layout.groups, size.page_counts, strict=True):
        match group.group.live.kind:
            case LiveKind.SLOT | LiveKind.TAIL:
                assert count - size.checkpoint_max >= (requests or 1)
            case LiveKind.WINDOW:
                assert count >= size.checkpoint_max * window_page_max(group.group) + 1
            case LiveKind.FULL | LiveKind.BLOCK:
                assert count >= 1
