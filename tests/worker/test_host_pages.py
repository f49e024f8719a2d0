"""The tier in host memory of a rank: what comes back is what left, or is named and not used."""

from __future__ import annotations

import random
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Role, ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import ConfigError, NotNow
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.worker import MovePages, PageCopies, PagesMoved
from common.transport.copies import copy_runs, digest_pages, save_pages
from common.worker import host_page_counts
from common.worker.device_thread import JobThread
from common.worker.host_page_counts import (
    GIB,
    UNLIMITED_PAGE_COUNT,
    check_host_memory,
    decide_host_page_counts,
    host_share_nbytes,
)
from common.worker.host_pages import HostPages, adjacent_runs, copy_slices, start_host_pages

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)

WINDOW = Live(LiveKind.WINDOW, 20)
POOL_COUNTS = [6, 4, 3, 5]
HOST_COUNTS = [9, 2, 4, 7]
EMPTY_GROUP = 3
"""Whose layers are on the other pipeline stage."""


def component(live: Live, layer: int, unit_nbytes: int, dtype: str) -> CacheComponent:
    name = f"{live.kind}-{layer}"
    segments = (Segment("head", 1, unit_nbytes),)
    return CacheComponent(name, (layer,), segments, live, Shard.SPLIT, dtype)


def first_stage() -> RankLayout:
    """Pages of 7 x 4, 3 x 4 and 4099 bytes, and a group of the other stage."""
    components = (
        component(FULL, 0, 7, "float8_e4m3fn"),
        component(WINDOW, 0, 3, "float8_e4m3fn"),
        component(SLOT, 0, 4099, "float8_e4m3fn"),
        component(Live(LiveKind.TAIL, 4, 2), 1, 8, "float32"),
    )
    layout = ServerLayout(components, 1, ((0, 1), (1, 2)), 4).rank(0, 0)
    assert [group.page_nbytes for group in layout.groups] == [28, 12, 4099, 0]
    return layout


class Tier:
    """A pool of random bytes with a tier, and what every page of both should hold."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        self.rng = random.Random(seed)
        self.layout = first_stage()
        self.pool = KvPool.allocate(self.layout, POOL_COUNTS, device)
        self.host = HostPages(self.pool, HOST_COUNTS)
        self.move_id = 0
        self.expected: dict[tuple[int, int], bytes] = {}
        self.spilled: dict[tuple[int, int], bytes] = {}
        for group, count in enumerate(POOL_COUNTS):
            for page in range(count + 1):
                self.overwrite(group, page)

    def overwrite(self, group: int, page: int) -> None:
        nbytes = self.layout.groups[group].page_nbytes
        content = self.rng.randbytes(nbytes)
        self.expected[group, page] = content
        page_bytes = self.pool.buffers[group][page * nbytes : (page + 1) * nbytes]
        page_bytes.copy_(torch.tensor(list(content), dtype=torch.uint8))

    def move(self, pages: list[PageCopies], *, is_spill: bool) -> PagesMoved:
        self.move_id += 1
        answer = self.host.run(MovePages(self.move_id, is_spill, pages))
        assert (answer.move_id, answer.rank) == (self.move_id, 0)
        return answer

    def spill(self, group: int, source_ids: list[int], target_ids: list[int]) -> None:
        assert self.move([PageCopies(group, source_ids, target_ids)], is_spill=True).error == ""
        for source, target in zip(source_ids, target_ids, strict=True):
            self.spilled[group, target] = self.expected[group, source]

    def load(self, group: int, source_ids: list[int], target_ids: list[int]) -> str:
        error = self.move([PageCopies(group, source_ids, target_ids)], is_spill=False).error
        if not error:
            for source, target in zip(source_ids, target_ids, strict=True):
                self.expected[group, target] = self.spilled[group, source]
        return error

    def flip_bit(self, group: int, page: int, byte: int, bit: int) -> None:
        self.host.buffers[group][page * self.layout.groups[group].page_nbytes + byte] ^= 1 << bit

    def check_pool(self) -> None:
        """Every byte, of page 0 too."""
        for group, buffer in enumerate(self.pool.buffers):
            pages = range(POOL_COUNTS[group] + 1)
            wanted = b"".join(self.expected[group, page] for page in pages)
            assert bytes(buffer.tolist()) == wanted, group


@pytest.fixture
def tier() -> Tier:
    return Tier()


# ---- moves ---------------------------------------------------------------------------------------


def test_pages_of_all_groups_come_back_elsewhere_in_one_move(tier: Tier) -> None:
    spill = [
        PageCopies(0, [2, 3, 6], [9, 1, 5]),
        PageCopies(1, [4], [2]),
        PageCopies(2, [1, 2], [3, 4]),
        PageCopies(EMPTY_GROUP, [1, 5], [2, 3]),
    ]
    assert tier.move(spill, is_spill=True) == PagesMoved(1, 0)
    left = {key: tier.expected[key] for key in [(0, 2), (0, 3), (0, 6), (1, 4), (2, 1), (2, 2)]}
    for group, count in enumerate(POOL_COUNTS):
        for page in range(count + 1):
            tier.overwrite(group, page)
    load = [
        PageCopies(0, [1, 9, 5], [1, 2, 3]),
        PageCopies(1, [2], [1]),
        PageCopies(2, [4, 3], [3, 1]),
        PageCopies(EMPTY_GROUP, [3, 2], [4, 1]),
    ]
    assert tier.move(load, is_spill=False) == PagesMoved(2, 0)
    tier.expected |= {
        (0, 1): left[0, 3],
        (0, 2): left[0, 2],
        (0, 3): left[0, 6],
        (1, 1): left[1, 4],
        (2, 3): left[2, 2],
        (2, 1): left[2, 1],
    }
    tier.check_pool()


def run_any_moves(tier: Tier, move_count: int) -> None:
    """Moves of one group each, between which other pages are written."""
    rng = tier.rng
    for _ in range(move_count):
        group = rng.randrange(len(POOL_COUNTS))
        pool_ids = range(1, POOL_COUNTS[group] + 1)
        if rng.random() < 0.5:
            count = rng.randint(0, min(POOL_COUNTS[group], HOST_COUNTS[group]))
            targets = rng.sample(range(1, HOST_COUNTS[group] + 1), count)
            tier.spill(group, rng.sample(pool_ids, count), targets)
        else:
            held = [page for owner, page in tier.spilled if owner == group]
            count = rng.randint(0, min(len(held), len(pool_ids)))
            assert not tier.load(group, rng.sample(held, count), rng.sample(pool_ids, count))
        tier.check_pool()
        tier.overwrite(group, rng.choice(pool_ids))


@pytest.mark.slow
@PROPERTY
@given(st.integers(0, 1 << 32), st.integers(1, 25))
def test_any_moves_leave_what_single_copies_of_pages_would(seed: int, move_count: int) -> None:
    run_any_moves(Tier(seed), move_count)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_pinned_memory_takes_and_gives_the_pages_of_a_gpu() -> None:
    tier = Tier(device="cuda")
    assert tier.host.buffers[0].is_pinned()
    run_any_moves(tier, 40)
    tier.spill(2, [1], [4])
    tier.flip_bit(2, 4, 0, 0)
    assert tier.load(2, [4], [2]) == "host memory has changed: page 4 of group slot"
    tier.check_pool()


@pytest.mark.slow
@PROPERTY
@given(st.integers(0, 2), st.data())
def test_a_flipped_bit_is_named_and_nothing_is_loaded(group: int, data: st.DataObject) -> None:
    tier = Tier()
    count = min(POOL_COUNTS[group], HOST_COUNTS[group])
    ids = list(range(1, count + 1))
    tier.spill(group, ids, ids)
    page = data.draw(st.sampled_from(ids))
    byte = data.draw(st.integers(0, tier.layout.groups[group].page_nbytes - 1))
    bit = data.draw(st.integers(0, 7))

    tier.flip_bit(group, page, byte, bit)
    name = ("full", "window-20", "slot")[group]
    error = f"host memory has changed: page {page} of group {name}"
    assert tier.load(group, ids, ids[::-1]) == error
    tier.check_pool()
    # The others can still be loaded, and the page too if it is as it was.
    others = [other for other in ids if other != page]
    assert tier.load(group, others, others) == ""
    tier.flip_bit(group, page, byte, bit)
    assert tier.load(group, ids, ids[::-1]) == ""
    tier.check_pool()


def test_a_changed_page_of_a_later_group_leaves_the_earlier_ones_unwritten(tier: Tier) -> None:
    tier.spill(0, [1], [1])
    tier.spill(2, [1], [4])
    tier.flip_bit(2, 4, 4098, 7)
    load = [PageCopies(0, [1], [2]), PageCopies(2, [4], [2])]
    error = tier.move(load, is_spill=False).error
    assert error == "host memory has changed: page 4 of group slot"
    tier.check_pool()


def test_a_page_that_is_spilled_over_has_the_digest_of_what_it_holds_now(tier: Tier) -> None:
    tier.spill(1, [1], [2])
    tier.spill(1, [3], [2])
    assert tier.load(1, [2], [4]) == ""
    assert tier.expected[1, 4] == tier.expected[1, 3] != tier.expected[1, 1]
    tier.check_pool()


def test_a_page_that_changed_is_good_again_after_the_next_spill_to_it(tier: Tier) -> None:
    tier.spill(0, [1, 2], [7, 8])
    tier.flip_bit(0, 8, 0, 0)
    assert tier.load(0, [8], [3]) == "host memory has changed: page 8 of group full"
    tier.spill(0, [2], [8])
    assert tier.load(0, [7, 8], [4, 3]) == ""
    tier.check_pool()


@pytest.mark.parametrize(
    ("is_spill", "copies"),
    [
        (True, PageCopies(0, [0], [1])),
        (True, PageCopies(0, [1], [0])),
        (True, PageCopies(0, [7], [1])),
        (True, PageCopies(0, [1], [10])),
        (True, PageCopies(0, [1, 2], [3, 3])),
        (True, PageCopies(0, [1, 2], [3])),
        (False, PageCopies(0, [10], [1])),
        (False, PageCopies(0, [1], [7])),
        (False, PageCopies(0, [-1], [1])),
    ],
)
def test_pages_that_only_a_bug_can_name_end_the_worker(
    tier: Tier, is_spill: bool, copies: PageCopies
) -> None:
    tier.spill(0, [1], [1])
    with pytest.raises(AssertionError):
        tier.move([PageCopies(1, [1], [1]), copies], is_spill=is_spill)
    tier.check_pool()


def test_without_a_tier_nothing_moves_and_no_memory_is_taken() -> None:
    pool = KvPool.allocate(first_stage(), POOL_COUNTS, "cpu")
    host = start_host_pages(config_of(), pool)
    assert (host.page_counts, host.nbytes, host.describe()) == ([], 0, "none")
    with pytest.raises(AssertionError, match="only where there is a tier"):
        host.run(MovePages(1, True, [PageCopies(0, [1], [1])]))


def test_moves_are_answered_in_order(tier: Tier) -> None:
    answers: SimpleQueue[PagesMoved] = SimpleQueue()
    thread = JobThread(
        "host page", torch.device("cpu"), tier.host.run, answers.put, lambda: pytest.fail("ended")
    )
    for move_id in range(1, 31, 2):  # the same page there and back, each time one further
        page = move_id % POOL_COUNTS[0] + 1
        thread.jobs.put(MovePages(move_id, True, [PageCopies(0, [1], [9])]))
        thread.jobs.put(MovePages(move_id + 1, False, [PageCopies(0, [9], [page])]))
        tier.expected[0, page] = tier.expected[0, 1]
    thread.start()
    thread.end()
    assert [answers.get().move_id for _ in range(30)] == list(range(1, 31))
    tier.check_pool()


# ---- runs ----------------------------------------------------------------------------------------


def test_pages_that_follow_each_other_on_both_sides_are_one_run() -> None:
    copies = PageCopies(0, [9, 8, 7, 3, 4, 5, 1], [4, 3, 2, 7, 8, 6, 9])
    targets, sources, sizes = (column.tolist() for column in adjacent_runs(copies, 10))
    runs = list(zip(targets, sources, sizes, strict=True))
    assert runs == [(90, 10, 10), (70, 30, 20), (60, 50, 10), (20, 70, 30)]


@pytest.mark.slow
@PROPERTY
@given(st.integers(0, 12), st.integers(1, 70), st.randoms(use_true_random=False))
def test_copies_of_slices_are_the_native_copies(
    count: int, page_nbytes: int, rng: random.Random
) -> None:
    """The way of CUDA, which the CPU can go as well."""
    source = torch.tensor(list(rng.randbytes(13 * page_nbytes)), dtype=torch.uint8)
    ids = rng.sample(range(1, 13), count), rng.sample(range(1, 13), count)
    runs = adjacent_runs(PageCopies(0, *ids), page_nbytes)
    native, sliced = torch.zeros_like(source), torch.zeros_like(source)
    copy_runs(native.numpy(), source.numpy(), *runs)
    copy_slices(sliced, source, runs)
    assert torch.equal(native, sliced)
    pages, copied = source.view(13, page_nbytes), native.view(13, page_nbytes)
    assert torch.equal(copied[list(ids[1])], pages[list(ids[0])])
    assert not copied[[page for page in range(13) if page not in ids[1]]].any()


# ---- sizes ---------------------------------------------------------------------------------------


def config_of(**changes: object) -> ServerConfig:
    values: dict[str, object] = {
        "role": Role.PREFILL,
        "model_path": "/model",
        "tokenizer_path": "/model",
        "served_model_name": "m",
        "port": 1,
        "pp_size": 2,
        **changes,
    }
    return ServerConfig(**values)  # type: ignore[arg-type]


def pool_nbytes_of(layout: RankLayout) -> int:
    return sum(KvPool.buffer_nbytes(layout, POOL_COUNTS))


@pytest.mark.parametrize(
    ("times", "counts"),
    [
        (0.5, [3, 2, 1, 2]),
        (1, [6, 4, 3, 5]),
        (2.5, [15, 10, 7, 12]),
        (1000, [6000, 4000, 3000, 5000]),
    ],
)
def test_the_tier_has_as_many_times_the_pages_as_the_bytes_of_the_pool(
    times: float, counts: list[int]
) -> None:
    """Each of two ranks has half of what was asked for."""
    layout = first_stage()
    config = config_of(host_cache_gb=2 * times * pool_nbytes_of(layout) / GIB)
    assert host_share_nbytes(config) == int(times * pool_nbytes_of(layout))
    assert decide_host_page_counts(layout, config, POOL_COUNTS) == counts


@PROPERTY
@given(st.lists(st.integers(1, 5000), min_size=4, max_size=4), st.floats(0.001, 1000))
def test_a_tier_has_as_many_pages_as_fit_into_its_share(counts: list[int], times: float) -> None:
    layout = first_stage()
    # Pages of 4 tokens, windows of 20 of them: six pages each, beside one of every other group.
    checkpoint_count = max(32, counts[0] * 4 // 128)
    pages_each = (counts[0], 6 * checkpoint_count, checkpoint_count, checkpoint_count)
    pool_counts, counts = counts, list(map(min, counts, pages_each))
    pool_nbytes = sum(KvPool.buffer_nbytes(layout, counts))
    config = config_of(host_cache_gb=times * pool_nbytes / GIB)
    share = host_share_nbytes(config)
    try:
        host_counts = decide_host_page_counts(layout, config, pool_counts)
    except ConfigError:
        assert share * min(counts) < pool_nbytes
        return
    for host_count, count in zip(host_counts, counts, strict=True):
        assert host_count >= 1
        assert host_count * pool_nbytes <= count * share < (host_count + 1) * pool_nbytes
    pages = zip(host_counts, layout.groups, strict=True)
    assert sum(count * group.page_nbytes for count, group in pages) <= share
    if share >= pool_nbytes:  # with page 0 too, which a smaller tier has beside its share
        assert sum(KvPool.buffer_nbytes(layout, host_counts)) <= share


@pytest.mark.parametrize("rank_count", [1, 2])
def test_too_little_for_a_page_of_each_group_is_refused_with_what_is_enough(
    rank_count: int,
) -> None:
    layout = first_stage()
    config = config_of(host_cache_gb=1e-6, pp_size=rank_count)
    with pytest.raises(ConfigError) as caught:
        decide_host_page_counts(layout, config, [100, 40, 3, 50])
    text = str(caught.value)
    assert text.startswith("--host-cache-gb 1e-06: no room for a page of group slot: must be 0 or ")
    least = float(text.rpartition(" ")[2])
    enough = config_of(host_cache_gb=least, pp_size=rank_count)
    assert min(decide_host_page_counts(layout, enough, [100, 40, 3, 50])) == 1
    with pytest.raises(ConfigError):
        less = config_of(host_cache_gb=least - 2e-6, pp_size=rank_count)
        decide_host_page_counts(layout, less, [100, 40, 3, 50])


def test_a_rank_that_owns_nothing_of_the_cache_limits_no_other() -> None:
    components = (component(FULL, 0, 8, "float32"),)
    layout = ServerLayout(components, 1, ((0, 1), (1, 2)), 4).rank(1, 0)
    config = config_of(host_cache_gb=0.5)
    assert decide_host_page_counts(layout, config, [7]) == [UNLIMITED_PAGE_COUNT]
    host = HostPages(KvPool.allocate(layout, [7], "cpu"), [UNLIMITED_PAGE_COUNT])
    move = MovePages(4, True, [PageCopies(0, [7], [UNLIMITED_PAGE_COUNT])])
    assert (host.nbytes, host.run(move)) == (0, PagesMoved(4, 1))


def test_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_page_counts, "free_nbytes", lambda device: 1 << 20)
    asked = config_of(host_cache_gb=0.5)
    check_host_memory(asked, 1 << 20)
    taken = "--host-cache-gb 0.5: takes 1048577 bytes of this machine's memory, 1048576 are free"
    with pytest.raises(NotNow, match=f"^{taken}$"):
        check_host_memory(asked, (1 << 20) + 1)
    pool = KvPool.allocate(first_stage(), POOL_COUNTS, "cpu")
    with pytest.raises(NotNow, match=r"^--host-cache-gb 0\.5: takes \d+ bytes"):
        start_host_pages(asked, pool)


def test_a_tier_is_described_by_its_bytes_and_pages() -> None:
    layout = first_stage()
    config = config_of(host_cache_gb=2 * 10 * pool_nbytes_of(layout) / GIB)
    host = start_host_pages(config, KvPool.allocate(layout, POOL_COUNTS, "cpu"))
    assert host.page_counts == [60, 40, 30, 50]
    assert host.describe() == f"{host.nbytes / GIB:.3g} GiB: 60, 40, 30, 50 pages"
    assert [len(buffer) for buffer in host.buffers] == [61 * 28, 41 * 12, 31 * 4099, 0]


# ---- digests -------------------------------------------------------------------------------------


@PROPERTY
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_bit_that_differs_gives_another_digest(content: bytes, data: st.DataObject) -> None:
    page = np.frombuffer(content, dtype=np.uint8)
    both = np.concatenate((page, page))
    place = data.draw(st.integers(0, len(page) - 1))
    first = np.arange(2, dtype=np.int64)
    same = digest_pages(both, first, len(page))
    assert same[0] == same[1]
    both[len(page) + place] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    other = digest_pages(both, first, len(page))
    assert other[0] == same[0] != other[1]


@pytest.mark.parametrize("pages", [[3], [-1]])
def test_a_page_outside_its_buffer_is_neither_saved_nor_digested(pages: list[int]) -> None:
    buffer, wrong = np.zeros(12, dtype=np.uint8), np.array(pages, dtype=np.int64)
    with pytest.raises(ValueError, match="is outside its buffer"):
        digest_pages(buffer, wrong, 4)
    for target_ids, source_ids in ((wrong, np.array([0])), (np.array([0]), wrong)):
        with pytest.raises(ValueError, match="is outside its buffer"):
            save_pages(
                buffer, buffer.copy(), target_ids, source_ids, 4, piece_nbytes=8, pause_ratio=0.0
            )
