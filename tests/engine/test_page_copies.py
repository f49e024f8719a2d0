"""Copies of whole pages inside a pool, against a copy page by page from a picture of the pool."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.cache.kv_pool import KvPool
from common.engine.cache.page_copies import copy_pages, copy_rows
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.worker import PageCopies

PAGE_COUNTS = [23, 9, 14, 6, 11]
WINDOW, TAIL, BLOCK = Live(LiveKind.WINDOW, 12), Live(LiveKind.TAIL, 4, 4), Live(LiveKind.BLOCK, 4)


def component(name: str, layer: int, live: Live, dtype: str, unit_nbytes: int) -> CacheComponent:
    heads = (Segment("head", 4, unit_nbytes),)
    return CacheComponent(name, (layer,), heads, live, Shard.SPLIT, dtype)


# Five page groups; of two stages the first has no slots, the second nothing else.
COMPONENTS = (
    component("k", 0, FULL, "bfloat16", 6),
    component("k", 1, WINDOW, "float32", 32),
    component("kv", 0, TAIL, "float16", 10),
    component("state", 2, SLOT, "float32", 4),
    component("block", 1, BLOCK, "float8_e4m3fn", 3),
)

Memory = list[NDArray[np.uint8]]


def ranks_of(tp_size: int, page_size: int) -> list[RankLayout]:
    server = ServerLayout(COMPONENTS, tp_size, ((0, 2), (2, 3)), page_size)
    server.check()
    return list(server.ranks)


def pool_of_noise(layout: RankLayout, seed: int) -> KvPool:
    pool = KvPool.allocate(layout, PAGE_COUNTS, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.buffers:
        buffer.random_(0, 256, generator=generator)
    return pool


def memory_of(pool: KvPool) -> Memory:
    return [buffer.numpy().copy() for buffer in pool.buffers]


def copied_slowly(layout: RankLayout, before: Memory, copies: list[PageCopies]) -> Memory:
    """What the copies leave behind, all of which read `before`."""
    after = [buffer.copy() for buffer in before]
    for one in copies:
        nbytes = layout.groups[one.group].page_nbytes
        for source, target in zip(one.source_ids, one.target_ids, strict=True):
            for byte in range(nbytes):
                after[one.group][target * nbytes + byte] = before[one.group][source * nbytes + byte]
    return after


def random_copies(rng: random.Random, *, may_overlap: bool) -> list[PageCopies]:
    """Of several groups, one of which comes twice; sources may repeat, targets may not."""
    copies: list[PageCopies] = []
    for group, count in enumerate(PAGE_COUNTS):
        pages = rng.sample(range(1, count + 1), count)
        targets = pages[: rng.randint(0, count // 2)]
        sources = rng.choices(pages if may_overlap else pages[len(targets) :], k=len(targets))
        cut = rng.randint(0, len(targets))
        for part in (slice(0, cut), slice(cut, None)):
            copies.append(PageCopies(group, sources[part], targets[part]))
    rng.shuffle(copies)
    return copies


@pytest.mark.parametrize("may_overlap", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 8])
def test_pages_are_copied_whole_and_nothing_else_is_touched(
    page_size: int, tp_size: int, may_overlap: bool
) -> None:
    rng = random.Random(tp_size)
    for layout in ranks_of(tp_size, page_size):
        for _ in range(4):
            pool = pool_of_noise(layout, rng.randrange(1 << 30))
            copies, before = random_copies(rng, may_overlap=may_overlap), memory_of(pool)
            copy_pages(pool, copies)
            for found, expected in zip(
                memory_of(pool), copied_slowly(layout, before, copies), strict=True
            ):
                assert np.array_equal(found, expected)


def test_all_copies_read_what_was_there_before_them() -> None:
    layout = ranks_of(1, 8)[0]
    pool = pool_of_noise(layout, 1)
    before = pool.buffers[0].view(-1, layout.groups[0].page_nbytes).clone()
    copy_pages(pool, [PageCopies(0, [1, 2], [2, 3]), PageCopies(0, [3], [1])])  # a circle
    after = pool.buffers[0].view(-1, layout.groups[0].page_nbytes)
    assert torch.equal(after[[1, 2, 3]], before[[3, 1, 2]])


@pytest.mark.parametrize("at_once", [1, 3, 8, 100])
def test_rows_copied_some_at_a_time_are_those_copied_at_once(at_once: int) -> None:
    rows = torch.arange(20 * 5, dtype=torch.int64).view(20, 5)
    source, target = torch.tensor([7, 1, 1, 9, 15, 2, 4]), torch.tensor([3, 8, 19, 5, 6, 11, 12])
    expected = rows.clone()
    expected[target] = rows[source]
    copy_rows(rows, source, target, at_once)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    "copies",
    [
        [PageCopies(0, [0], [1])],
        [PageCopies(0, [1], [0])],
        [PageCopies(3, [7], [1])],
        [PageCopies(3, [1], [7])],
        [PageCopies(0, [-1], [1])],
        [PageCopies(0, [1, 2], [3])],
        [PageCopies(0, [1, 2], [3, 3])],
        [PageCopies(0, [1], [3]), PageCopies(0, [2], [3])],
    ],
)
def test_copies_that_can_not_be_meant_are_a_bug(copies: list[PageCopies]) -> None:
    pool = pool_of_noise(ranks_of(1, 8)[0], 1)
    before = memory_of(pool)
    with pytest.raises(AssertionError):
        copy_pages(pool, copies)
    assert all(map(np.array_equal, memory_of(pool), before))
