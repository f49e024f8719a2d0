"""Staged transfers between ranks over real UCX and ZMQ: bytes, slots, and what goes wrong."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from common.config import TransferMode
from common.layout.cache_layout import ServerLayout
from common.protocol.codec import encode_layout
from common.protocol.staging import SlotFreed
from common.protocol.worker import (
    CancelSends,
    ConnectPeer,
    Forget,
    OpenPeer,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    SendSettled,
)
from common.worker.staging.source import StagingSource
from tests.worker.staged_world import (
    BUFFER_NBYTES,
    Rank,
    World,
    after_transfer,
    fill,
    send_of,
    server_layout,
)
from tests.worker.whole_send import send_whole

TOKENS = 93
SOURCE_PAGES = [7, 2, 31, 4, 18, 9, 40, 41, 3, 60, 11, 12]
TARGET_PAGES = [5, 1, 30, 12, 13, 14, 2, 9, 20, 21, 22, 8, 44, 43, 50, 51, 52, 53, 54, 55, 56, 57,
                58, 59, 60]  # fmt: skip


def settled(message: object) -> SendSettled:
    assert isinstance(message, SendSettled), message
    return message


def lane_state(world: World) -> tuple[int, int, dict[int, int]]:
    """Free slots, free buffers and slots held per transfer, of the source's first lane."""
    source = world.source.staging_source
    assert source is not None
    lane = source.lane("target/0")
    assert lane is not None
    return len(lane.free), source.free_buffer_count, dict(lane.held)


def all_free(world: World) -> bool:
    free, buffers, held = lane_state(world)
    source = world.source.staging_source
    assert source is not None
    lane = source.lane("target/0")
    assert lane is not None
    return free == lane.slot_count and buffers == 4 and not held


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["posix,tcp", "tcp"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (server_layout(page_size=16), server_layout(page_size=64)),
        (server_layout(page_size=64), server_layout(page_size=8)),
        (server_layout(page_size=16, groups=3), server_layout(tp=2, page_size=4)),
        (server_layout(dtype="bfloat16"), server_layout(dtype="float8_e4m3fn", page_size=16)),
        (server_layout(dtype="float8_e4m3fn"), server_layout(dtype="bfloat16", tp=4)),
        (server_layout(), server_layout(dtype="bfloat16")),
        (server_layout(dtype="float16"), server_layout(page_size=4)),
    ],
    ids=["16-64", "64-8", "groups-tp2", "bf16-fp8", "fp8-bf16", "fp32-bf16", "fp16-fp32"],
)
def test_a_staged_send_reaches_its_pages_and_touches_nothing_else(
    source: ServerLayout, target: ServerLayout, tls: str
) -> None:
    world = World.make(source, target, tls)
    try:
        (connected,) = world.connect()
        assert isinstance(connected, PeerConnected) and connected.transfer_mode.startswith(
            "staged ("
        )
        fill(world.source, 1)
        before = []
        for index, rank in enumerate(world.targets):
            fill(rank, 2 + index)
            before.append(rank.pool.buffers[0].clone())
        world.expect(70, TOKENS, TARGET_PAGES)
        send = send_of(1, TOKENS, SOURCE_PAGES, TARGET_PAGES)
        world.source.messages += send_whole(world.source.sends, send)
        (message,) = world.wait_for(1)
        assert (settled(message).error, settled(message).is_quiet) == ("", True)
        for rank, held in zip(world.targets, before, strict=True):
            wanted = after_transfer(world.source, rank, held, TOKENS, SOURCE_PAGES, TARGET_PAGES)
            assert torch.equal(rank.pool.buffers[0], wanted)
        assert all_free(world)
    finally:
        world.close()


def test_in_staged_mode_the_pool_is_not_among_what_is_announced() -> None:
    world = World.make(server_layout(), server_layout(page_size=16))
    try:
        layout = encode_layout(world.source.layout.server)
        opened = world.targets[0].links.open(
            OpenPeer("source", layout=layout, transfer_mode=TransferMode.STAGED)
        )
        assert isinstance(opened, PeerOpened)
        descriptor = opened.descriptor
        assert descriptor.regions == [] and descriptor.page_counts == [64]
        assert descriptor.staging_buffer is not None
        region = descriptor.staging_buffer.region[1:3]
        pool = world.targets[0].pool.buffers[0]
        assert region[1] == 16 * BUFFER_NBYTES
        start, end = region[0], sum(region)
        assert pool.data_ptr() + pool.nbytes <= start or end <= pool.data_ptr()
    finally:
        world.close()


@pytest.mark.parametrize("transfer_mode", [TransferMode.AUTO, TransferMode.DIRECT])
def test_without_need_nothing_is_staged(transfer_mode: TransferMode) -> None:
    """Long runs over shared memory: a direct transfer, without a scatter."""
    world = World.make(server_layout(), server_layout(), transfer_mode=transfer_mode)
    try:
        (connected,) = world.connect()
        assert isinstance(connected, PeerConnected)
        assert connected.transfer_mode.startswith(
            "direct" if transfer_mode is TransferMode.DIRECT else "stag"
        )
        fill(world.source, 1)
        held = world.targets[0].pool.buffers[0].clone()
        send = send_of(1, TOKENS, SOURCE_PAGES, TARGET_PAGES)
        world.source.messages += send_whole(world.source.sends, send)
        assert settled(world.wait_for(1)[0]).error == ""
        wanted = after_transfer(
            world.source, world.targets[0], held, TOKENS, SOURCE_PAGES, TARGET_PAGES
        )
        assert torch.equal(world.targets[0].pool.buffers[0], wanted)
        target = world.targets[0].staging_target
        assert target is not None and target.counters.pieces == 0
    finally:
        world.close()


# ---- freed slots ---------------------------------------------------------------------------------


def two_transfers(world: World) -> None:
    """Two requests of many pieces each, both expected."""
    world.expect(70, 256, range(1, 33))
    world.expect(71, 256, range(33, 65))


def test_a_transfer_that_stalls_leaves_slots_to_the_others() -> None:
    # given: slots so small that one request needs more than the ring has
    world = World.make(server_layout(head_dim=256), server_layout(head_dim=256), slot_count=8)
    try:
        world.connect()
        world.stalled = True
        two_transfers(world)
        first = send_of(1, 256, range(1, 33), range(1, 33), transfer_id=70)
        assert send_whole(world.source.sends, first) == []
        for _ in range(20):
            world.turn()
        free, _, held = lane_state(world)
        assert held == {70: 3} and free == 1  # a ring of 4, three of them for one transfer
        second = send_of(2, 256, range(33, 65), range(33, 65), transfer_id=71)
        assert send_whole(world.source.sends, second) == []
        for _ in range(20):
            world.turn()
        assert lane_state(world)[2] == {70: 3, 71: 1}
        world.stalled = False
        messages = [settled(message) for message in world.wait_for(2)]
        assert {(m.send_id, m.error) for m in messages} == {(1, ""), (2, "")}
        assert all_free(world)
        sent = world.source.pool.buffers[0].view(65, -1)[1:]
        assert torch.equal(world.targets[0].pool.buffers[0].view(65, -1)[1:], sent)
    finally:
        world.close()


def test_a_cancelled_transfer_settles_when_its_slots_are_back() -> None:
    world = World.make(server_layout(head_dim=256), server_layout(head_dim=256))
    try:
        world.connect()
        world.stalled = True
        two_transfers(world)
        for send_id, pages in ((1, range(1, 33)), (2, range(33, 65))):
            send = send_of(send_id, 256, pages, pages, transfer_id=69 + send_id)
            assert send_whole(world.source.sends, send) == []
        for _ in range(20):
            world.turn()
        assert world.source.sends.cancel(CancelSends(70)) == []  # its slots are not back
        world.source.messages += world.source.io.take()
        assert world.source.messages == []
        world.stalled = False
        messages = {settled(m).send_id: settled(m) for m in world.wait_for(2)}
        assert (messages[1].error, messages[1].is_quiet) == ("cancelled", True)
        assert messages[2].error == ""
        assert all_free(world)
    finally:
        world.close()


def test_what_the_target_forgot_fails_the_send_and_returns_every_slot() -> None:
    world = World.make(server_layout(head_dim=256), server_layout(head_dim=256))
    try:
        world.connect()
        two_transfers(world)
        before = world.targets[0].pool.buffers[0].clone()
        target = world.targets[0].staging_target
        assert target is not None
        target.forget(Forget(70))
        send = send_of(1, 256, range(1, 33), range(1, 33), transfer_id=70)
        assert send_whole(world.source.sends, send) == []
        message = settled(world.wait_for(1)[0])
        assert "transfer 70: is not expected from this peer" in message.error
        assert torch.equal(world.targets[0].pool.buffers[0], before)
        assert all_free(world)
    finally:
        world.close()


def test_a_lost_message_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(server_layout(), server_layout())
    try:
        world.connect()
        world.expect(70, TOKENS, TARGET_PAGES)
        world.stalled = True
        send = send_of(1, TOKENS, SOURCE_PAGES, TARGET_PAGES)
        assert send_whole(world.source.sends, send) == []
        source, target = world.source.staging_source, world.targets[0].staging_target
        assert source is not None and target is not None
        while not source.counters.repeated:
            world.turn()
        # The first one is lost: the target reads it and does nothing.
        with monkeypatch.context() as deaf:
            deaf.setattr(target, "apply_filled", lambda _: None)
            target.receive()
        world.stalled = False
        assert settled(world.wait_for(1)[0]).error == ""
        assert all_free(world)
    finally:
        world.close()


def test_a_slot_freed_twice_or_by_strangers_changes_nothing() -> None:
    world = World.make(server_layout(), server_layout())
    try:
        world.connect()
        source = world.source.staging_source
        assert isinstance(source, StagingSource)
        lane = source.lane("target/0")
        assert lane is not None
        for freed in (
            SlotFreed(lane.ring, 999, 0),
            SlotFreed(lane.ring + 1, 1, 0),
            SlotFreed(0, 0, 7),
        ):
            source.apply_freed(lane, freed)
        assert source.counters.stale == 3 and all_free(world)
    finally:
        world.close()


# ---- lost peers and bad announcements ------------------------------------------------------------


@pytest.mark.parametrize("tls", ["posix,tcp", "tcp"])
def test_a_target_that_dies_in_mid_piece_returns_every_buffer(tls: str) -> None:
    world = World.make(server_layout(head_dim=256), server_layout(head_dim=256), tls)
    try:
        world.connect()
        world.stalled = True
        send = send_of(1, 256, range(1, 33), range(1, 33), transfer_id=70)
        assert send_whole(world.source.sends, send) == []
        for _ in range(10):
            world.turn()
        assert lane_state(world)[2]  # slots are full and not freed
        world.targets[0].close()
        messages = world.wait_for(2)
        assert [type(message) for message in messages] == [SendSettled, PeerFailed]
        assert settled(messages[0]).error and settled(messages[0]).is_quiet
        source = world.source.staging_source
        assert source is not None and source.lane("target/0") is None
        assert source.free_buffer_count == 4 and source.is_idle
        assert world.source.links.close("target") == [PeerClosed("target", 0)]
    finally:
        world.source.close()


def test_closing_settles_what_waits_for_freed_slots_first_and_the_peer_can_come_again() -> None:
    world = World.make(server_layout(head_dim=256), server_layout(head_dim=256))
    try:
        for _ in range(2):
            world.connect()
            two_transfers(world)
            world.stalled = True
            send = send_of(1, 256, range(1, 33), range(1, 33), transfer_id=70)
            assert send_whole(world.source.sends, send) == []
            for _ in range(10):
                world.turn()
            world.source.messages += world.source.sends.cancel_peer("target", "closed")
            world.source.messages += world.source.links.close("target")
            messages = world.wait_for(2)
            assert [type(message) for message in messages] == [SendSettled, PeerClosed]
            world.stalled = False
            assert world.targets[0].links.close("source") == [PeerClosed("source", 0)]
        target = world.targets[0].staging_target
        assert target is not None
        target.reclaim("source")
        assert target.free_slot_count == 16
    finally:
        world.close()


def test_a_rank_that_grants_no_slots_is_named_where_they_are_needed() -> None:
    world = World.make(server_layout(), server_layout(dtype="bfloat16"))
    try:
        layout = encode_layout(world.source.layout.server)
        opened = world.targets[0].links.open(
            OpenPeer("source", layout=layout, transfer_mode=TransferMode.AUTO)
        )
        assert isinstance(opened, PeerOpened)
        without = msgspec.structs.replace(opened.descriptor, staging_buffer=None)
        theirs = encode_layout(world.targets[0].layout.server)
        (failed,) = world.source.links.connect(
            ConnectPeer("target", theirs, [without], TransferMode.AUTO)
        )
        assert isinstance(failed, PeerFailed)
        assert failed.reason == "rank 0 of the peer granted no staging slots to rank 0"
    finally:
        world.close()


def test_a_lane_without_answers_fails_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.staging.source.LANE_TIMEOUT_S", 0.2)
    world = World.make(server_layout(), server_layout())
    try:
        world.stalled = True
        (failed,) = world.connect()
        assert isinstance(failed, PeerFailed) and "does not answer" in failed.reason
    finally:
        world.close()


def test_a_full_staging_buffer_refuses_only_those_who_need_it() -> None:
    rank = Rank.target(server_layout().ranks[0], "tcp", slot_count=16)
    try:
        same, other = (
            encode_layout(server_layout(dtype=dtype)) for dtype in ("float32", "float16")
        )
        assert rank.staging_target is not None
        fillers = (f"filler-{index}" for index in itertools.count())
        while not isinstance(rank.staging_target.open(next(fillers), server_layout(), ""), str):
            pass
        full = rank.links.open(OpenPeer("a", layout=same, transfer_mode=TransferMode.AUTO))
        assert isinstance(full, PeerOpened) and full.descriptor.staging_buffer is None
        for peer, layout, mode in (
            ("b", same, TransferMode.STAGED),
            ("c", other, TransferMode.AUTO),
        ):
            refused = rank.links.open(OpenPeer(peer, layout=layout, transfer_mode=mode))
            assert isinstance(refused, PeerFailed) and "raise --staging-buffer-mb" in refused.reason
        bad = rank.links.open(OpenPeer("d", layout=b"\xc1", transfer_mode=TransferMode.AUTO))
        assert isinstance(bad, PeerFailed) and "layout can't be read" in bad.reason
    finally:
        rank.close()
