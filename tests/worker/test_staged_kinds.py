"""Slots, tails and blocks between ranks over real UCX, one of which caches nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.config import TransferMode
from common.engine.cache.cast import raw
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.worker import (
    CloseTransfer,
    Expect,
    OpenTransfer,
    PeerConnected,
    Send,
    SendSettled,
)
from tests.worker.staged_world import PAGE_COUNT, Rank, World

COMPONENTS = (
    CacheComponent(
        "conv",
        (0, 1),
        (Segment("q", 2, 6), Segment("k", 2, 6), Segment("v", 4, 6)),
        SLOT,
        Shard.SPLIT,
        "bfloat16",
    ),
    CacheComponent("state", (0, 1), (Segment("head", 4, 4096),), SLOT, Shard.SPLIT, "float32"),
    CacheComponent("k", (2,), (Segment("head", 4, 128),), FULL, Shard.SPLIT, "bfloat16"),
    CacheComponent(
        "tail",
        (1,),
        (Segment("row", 1, 24),),
        Live(LiveKind.TAIL, 4, 3),
        Shard.REPLICATE,
        "float32",
    ),
    CacheComponent(
        "block", (2,), (Segment("row", 1, 40),), Live(LiveKind.BLOCK, 4), Shard.REPLICATE, "float32"
    ),
    CacheComponent(
        "window", (2,), (Segment("head", 2, 16),), Live(LiveKind.WINDOW, 20), Shard.SPLIT, "float32"
    ),
)
SOURCE = ServerLayout(COMPONENTS, 1, ((0, 4),), 8, layer_group_count=2)
TARGET = ServerLayout(COMPONENTS, 2, ((0, 1), (1, 3), (3, 4)), 16)
TOKENS, FIRST_CHUNK = 93, 38


def pages_of(layout: ServerLayout, first_page: int) -> list[tuple[int, list[int]]]:
    """Pages of all tokens, in falling order, so that nothing lies where its index says."""
    counts = [group.page_end(TOKENS) for group in layout.groups]
    return [(0, [first_page + count - i for i in range(count)]) for count in counts]


def fill(rank: Rank, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in rank.pool.buffers:
        noise = torch.randint(0, 256, buffer.shape, generator=generator, dtype=torch.uint8)
        buffer.copy_(noise)


def without(pages: list[tuple[int, list[int]]], *, windows: bool) -> list[tuple[int, list[int]]]:
    """Lists of window groups left empty, or all others."""
    kinds = [group.live.kind is LiveKind.WINDOW for group in SOURCE.groups]
    return [
        (0, []) if is_window == windows else found
        for found, is_window in zip(pages, kinds, strict=True)
    ]


def open_transfer() -> OpenTransfer:
    source_pages = without(pages_of(SOURCE, 30), windows=True)
    return OpenTransfer(70, "target", source_pages, pages_of(TARGET, 10))


def send_of(send_id: int, start: int, stop: int) -> Send:
    windows = without(pages_of(SOURCE, 30), windows=False) if stop == TOKENS else []
    return Send(send_id, 0, 70, start, stop, stop == TOKENS, windows)


def live_rows(rank: Rank, first_page: int, component: str, layer: int, segment: str) -> Tensor:
    """[item, unit, byte] of what a request needs to go on, read through the pool's own view."""
    pool = rank.pool
    plane = pool.plane(component, layer, segment)
    group = pool.groups[plane.geometry.group]
    _, pages = pages_of(rank.layout.server, first_page)[plane.geometry.group]
    rows = [
        raw(plane.view)[pages[item // group.page_items if group.live.is_paged else 0], :, row]
        for item in group.live.items(TOKENS)
        for row in [item % group.page_items]
    ]
    return torch.stack(rows).contiguous().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("transfer_mode", [TransferMode.STAGED, TransferMode.DIRECT])
def test_every_kind_arrives_at_every_rank_and_a_bare_stage_delays_no_rank(
    transfer_mode: TransferMode,
) -> None:
    world = World.make(SOURCE, TARGET, transfer_mode=transfer_mode)
    try:
        (connected,) = world.connect()
        assert isinstance(connected, PeerConnected)
        fill(world.source, 1)
        for index, rank in enumerate(world.targets):
            fill(rank, 2 + index)
            assert rank.staging_target is not None
            rank.staging_target.expect(Expect(70, "source", TOKENS, pages_of(TARGET, 10)))
        scratch = [[b[: len(b) // (PAGE_COUNT + 1)].clone() for b in r.pool.buffers]
                   for r in world.targets]  # fmt: skip
        world.source.sends.open(open_transfer())
        for send_id, (start, stop) in enumerate([(0, FIRST_CHUNK), (FIRST_CHUNK, TOKENS)]):
            world.source.messages += world.source.sends.send(send_of(send_id, start, stop))
            (settled,) = world.wait_for(1)
            assert isinstance(settled, SendSettled) and settled.error == ""
            if start == 0:
                assert settled.nbytes == 38 * 4 * 128 + 2 * (38 // 4) * 40, "nothing but streamable"
        world.source.sends.close(CloseTransfer(70))
        assert world.source.sends.transfer_count == 0
        for rank, before in zip(world.targets, scratch, strict=True):
            for group in rank.layout.groups:
                for cell in group.cells:
                    key = (cell.component, cell.layer, cell.segment)
                    held = live_rows(world.source, 30, *key)
                    units = slice(cell.units.start, cell.units.stop)
                    assert torch.equal(live_rows(rank, 10, *key), held[:, units]), key
            for buffer, page in zip(rank.pool.buffers, before, strict=True):
                assert torch.equal(buffer[: len(page)], page), "the scratch page was written"
    finally:
        world.close()
