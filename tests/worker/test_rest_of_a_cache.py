"""Behind a prefix over real UCX: just the bytes of the rest move, and no other byte changes."""

from __future__ import annotations

import pytest
import torch

from common.config import TransferMode
from common.engine.cache.cast import raw
from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import LiveKind
from common.protocol.worker import Expect, OpenTransfer, PeerConnected, Send, SendSettled
from tests.worker.staged_world import Rank, World, page_counts
from tests.worker.test_staged_kinds import SOURCE, TARGET, fill, without

PageLists = list[tuple[int, list[int]]]

# Pages of the target end after every 16 tokens, in both groups that grow; the source's after 8.
TOKENS = 96
# Token 40 ends a page of the source and lies inside one of the target.
CHUNK_STOPS = (40, 70, TOKENS)


def pages_of(layout: ServerLayout, first_page: int, token_start: int = 0) -> PageLists:
    """In falling order; of groups that grow only those behind token_start."""

    def first_index(group: PageGroup) -> int:
        return token_start // group.page_tokens if group.live.is_streamable else 0

    return [
        (first, [first_page + group.page_end(TOKENS) - index for index in indices])
        for group in layout.groups
        for first in [first_index(group)]
        for indices in [range(first, group.page_end(TOKENS))]
    ]


def rest_nbytes(token_start: int) -> int:
    """By hand, of every copy at the target: a replicated row goes to both ranks of its stage."""
    keys, blocks = 4 * 128 * (TOKENS - token_start), 2 * 40 * ((TOKENS - token_start) // 4)
    window, tail = 2 * 16 * 19, 2 * 24 * 3
    conv, state = 2 * 48, 2 * 4 * 4096
    return keys + blocks + window + tail + conv + state


def wanted(source: Rank, target: Rank, before: list[torch.Tensor], token_start: int) -> KvPool:
    """A target's pool after the transfer, element by element. before: is written to."""
    expected = KvPool(target.layout, page_counts(target.layout), before)
    for group in target.layout.groups:
        live = group.group.live
        items = live.items(TOKENS)
        if live.is_streamable:
            items = range(token_start // max(1, live.size), items.stop)
        for cell in group.cells:
            key = (cell.component, cell.layer, cell.segment)
            held, written = source.pool.plane(*key), expected.plane(*key)
            for item in items:
                theirs = place_of(source, held.geometry.group, 30, item)
                ours = place_of(target, written.geometry.group, 10, item)
                row = raw(held.view)[theirs[0], cell.units.start : cell.units.stop, theirs[1]]
                raw(written.view)[ours[0], :, ours[1]] = row
    return expected


def place_of(rank: Rank, index: int, first_page: int, item: int) -> tuple[int, int]:
    """(page, row) of an item."""
    group = rank.layout.server.groups[index]
    _, pages = pages_of(rank.layout.server, first_page)[index]
    page = pages[item // group.page_items] if group.live.is_paged else pages[0]
    return page, item % group.page_items


def sends(token_start: int) -> list[Send]:
    """As a scheduler sends them: what lies before token_start is in none, and the last is final."""
    found: list[Send] = []
    begin = token_start
    for stop in CHUNK_STOPS:
        if stop > begin or stop == TOKENS:
            windows = without(pages_of(SOURCE, 30), windows=False) if stop == TOKENS else []
            found.append(Send(len(found), 0, 70, begin, stop, stop == TOKENS, windows))
            begin = stop
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["posix,tcp", "tcp"])
@pytest.mark.parametrize("transfer_mode", [TransferMode.STAGED, TransferMode.DIRECT])
@pytest.mark.parametrize("token_start", [0, 32, 48, TOKENS])
def test_every_kind_arrives_behind_a_prefix_and_no_other_byte_changes(
    token_start: int, transfer_mode: TransferMode, tls: str
) -> None:
    """The target's ranks and stages are others, and its pages twice as large."""
    world = World.make(SOURCE, TARGET, tls, transfer_mode)
    try:
        (connected,) = world.connect()
        assert isinstance(connected, PeerConnected)
        fill(world.source, 1)
        target_pages = pages_of(TARGET, 10, token_start)
        for index, rank in enumerate(world.targets):
            fill(rank, 2 + index)
            assert rank.staging_target is not None
            rank.staging_target.expect(Expect(70, "source", TOKENS, target_pages, token_start))
        before = [[buffer.clone() for buffer in rank.pool.buffers] for rank in world.targets]
        source_pages = without(pages_of(SOURCE, 30), windows=True)
        world.source.sends.open(OpenTransfer(70, "target", source_pages, target_pages))
        nbytes = 0
        for send in sends(token_start):
            world.source.messages += world.source.sends.send(send)
            (settled,) = world.wait_for(1)
            assert isinstance(settled, SendSettled) and settled.error == ""
            nbytes += settled.nbytes
        assert nbytes == rest_nbytes(token_start)
        for rank, buffers in zip(world.targets, before, strict=True):
            expected = wanted(world.source, rank, buffers, token_start)
            for index, buffer in enumerate(expected.buffers):
                assert torch.equal(rank.pool.buffers[index], buffer), (rank.layout.index, index)
    finally:
        world.close()


@pytest.mark.parametrize("transfer_mode", [TransferMode.STAGED, TransferMode.DIRECT])
def test_where_all_that_is_cached_grows_the_last_send_may_have_no_bytes(
    transfer_mode: TransferMode,
) -> None:
    """It settles at once, and without an error: all of the cache was there."""
    components = tuple(c for c in SOURCE.components if c.live.kind is LiveKind.FULL)
    layout = ServerLayout(components, 1, ((0, 4),), 8, layer_group_count=2)
    world = World.make(layout, layout, transfer_mode=transfer_mode)
    try:
        world.connect()
        fill(world.targets[0], 2)
        before = world.targets[0].pool.buffers[0].clone()
        world.source.sends.open(OpenTransfer(70, "target", [(0, [1, 2])], [(2, [])]))
        (settled,) = world.source.sends.send(Send(1, 0, 70, 16, 16, is_final=True))
        assert isinstance(settled, SendSettled)
        assert (settled.error, settled.nbytes, settled.is_quiet) == ("", 0, True)
        assert torch.equal(world.targets[0].pool.buffers[0], before)
    finally:
        world.close()
