"""Blocks that close in a pass: their rows against a list of all rows, rings full of NaN first."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from common.engine.attention.blocks import BlockPass, ClosedBlocks
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.layout.cache_layout import ServerLayout
from common.layout.component import CacheComponent, Live, LiveKind, Segment, Shard

WIDTH = 2
# New tokens of three sequences per pass, 0 for one that rests: prompts in one piece and in pieces
# that end anywhere, single tokens beside pieces, and pieces of several blocks.
PASSES = ((7, 1, 0), (1, 1, 13), (5, 2, 1), (1, 1, 1), (1, 1, 1), (6, 1, 4), (1, 9, 1), (2, 1, 1))


def make_pool(tail: Live, page_size: int) -> KvPool:
    def component(name: str, live: Live) -> CacheComponent:
        row = Segment("row", 1, WIDTH * 4)
        return CacheComponent(name, (0,), (row,), live, Shard.REPLICATE, "float32")

    components = (
        component("tail", tail),
        component("other_tail", tail),
        component("block", Live(LiveKind.BLOCK, tail.size)),
    )
    layout = ServerLayout(components, 1, ((0, 1),), page_size)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, 0), [100] * len(layout.groups), "cpu")
    for buffer in pool.buffers:
        buffer.view(torch.float32).fill_(float("nan"))
    return pool


def batch_of(pool: KvPool, lengths: tuple[int, ...], done: list[int]) -> ForwardBatch:
    """Tail pages 5, 3, 4; block pages of sequence s are 1 + s, 4 + s, 7 + s..."""
    pages = ([5, 3, 4], [list(range(1 + s, 100, 3)) for s in range(3)])
    chunks = [
        SequenceChunk([0] * length, done[s], ([pages[0][s]], pages[1][s]))
        for s, length in enumerate(lengths)
        if length
    ]
    return ForwardBatch.build(chunks, groups=pool.groups, device="cpu")


def row_of(sequence: int, position: int) -> Tensor:
    return torch.tensor([100.0 * sequence + position, float(position)])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("size", "back"), [(4, 4), (3, 0), (5, 5), (3, 2), (1, 1), (16, 0)])
def test_a_block_gets_the_rows_of_its_tokens(size: int, back: int, page_size: int) -> None:
    pool = make_pool(Live(LiveKind.TAIL, size, back), page_size)
    done = [0, 0, 0]
    blocks: dict[int, list[float]] = defaultdict(list)
    for lengths in PASSES:
        batch = batch_of(pool, lengths, done)
        active = [s for s in range(3) if lengths[s]]
        rows = torch.stack([row_of(s, done[s] + i) for s in active for i in range(lengths[s])])
        closing = [
            (s, block)
            for s in active
            for block in range(done[s] // size, (done[s] + lengths[s]) // size)
        ]
        block_pass = BlockPass(batch, pool)
        for tail, factor in (("tail", 1.0), ("other_tail", -1.0)):
            found = block_pass.collect(tail, 0, rows * factor)
            assert (found is None) == (not closing)
            for index, (s, block) in enumerate(closing):
                assert found is not None
                first = block * size
                for offset, position in enumerate(range(first - back, first + size)):
                    is_missing = bool(found.is_missing[index, offset, 0])
                    assert is_missing == (position < 0)
                    if not is_missing:
                        expected = row_of(s, position) * factor
                        assert torch.equal(found.rows[index, offset], expected)
                    assert found.rows[index, offset].isfinite().all()
        values = [1000.0 * s + block for s, block in closing]
        if values:
            block_pass.put("block", 0, torch.tensor(values)[:, None].expand(-1, WIDTH))
        for (s, _), value in zip(closing, values, strict=True):
            blocks[s].append(value)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    assert min(done) >= 16, "every sequence has a block of every size"
    table = batch_of(pool, (1, 1, 1), [d - 1 for d in done]).page_tables[1]
    for s in range(3):
        held = pool.view("block", 0)[table[s].to(torch.int64), 0].flatten(0, 1)
        assert held[: len(blocks[s]), 0].tolist() == blocks[s]
        assert len(blocks[s]) == done[s] // size


def test_closed_blocks_are_those_whose_last_token_is_new() -> None:
    pool = make_pool(Live(LiveKind.TAIL, 4, 0), 4)
    closed = ClosedBlocks.of(batch_of(pool, (1, 9, 3), [3, 6, 4]), 4)
    assert closed.sequences.tolist() == [0, 1, 1]
    assert closed.blocks.tolist() == [0, 1, 2]
    assert closed.first_positions.tolist() == [0, 4, 8]
    assert ClosedBlocks.of(batch_of(pool, (1, 2, 3), [4, 4, 4]), 4).count == 0
