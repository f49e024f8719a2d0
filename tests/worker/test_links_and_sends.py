"""Peers and transfers of a rank over real UCX, several ranks in one process, bytes checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.families import gqa_components
from common.protocol.codec import encode_layout
from common.protocol.descriptor import RankDescriptor
from common.protocol.worker import (
    CancelSends,
    ConnectPeer,
    OpenPeer,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    SendSettled,
    WorkerToScheduler,
)
from common.transport.transport import (
    CANCELLED,
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    TransferSettled,
)
from common.transport.ucx import UcxSettings, UcxTransport
from common.worker.io_loop import EngineOutbox
from common.worker.peer_links import PeerLinks
from common.worker.pools import allocate_pool
from common.worker.sends import Computed, Sends
from tests.worker.whole_send import WholeSend, send_whole

WAIT_S = 30.0
TOKENS = 45


def server_layout(*, tp_size: int, page_size: int, layer_group_count: int = 1) -> ServerLayout:
    components = gqa_components(layer_count=3, kv_head_count=4, head_dim=4, dtype="float32")
    return ServerLayout(components, tp_size, ((0, 3),), page_size, layer_group_count)


@dataclass
class Rank:
    """What the I/O thread of one rank owns."""

    layout: RankLayout
    transport: UcxTransport
    pool: KvPool
    links: PeerLinks
    sends: Sends

    @staticmethod
    def start(layout: RankLayout, page_count: int = 32, tls: str = "posix,tcp") -> Rank:
        transport = UcxTransport(UcxSettings(tls=tls))
        pool = allocate_pool(transport, layout, [page_count], torch.device("cpu"))
        links = PeerLinks(transport, layout)
        sends = Sends(transport, links, layout, [page_count])
        return Rank(layout, transport, pool, links, sends)

    def wait(self) -> list[WorkerToScheduler]:
        """What the next transport events mean."""
        assert self.transport.wait(WAIT_S), "no event"
        messages: list[WorkerToScheduler] = []
        for event in self.transport.poll():
            match event:
                case TransferSettled():
                    messages += self.sends.apply_settled(event)
                case ConnectionMade():
                    messages += self.links.apply_connected(event)
                case ConnectionFailed() | ConnectionClosed():
                    messages += self.links.apply_gone(event)
        return messages

    def wait_for(self, count: int) -> list[WorkerToScheduler]:
        messages: list[WorkerToScheduler] = []
        while len(messages) < count:
            messages += self.wait()
        return messages


@dataclass
class World:
    """One source rank and the target ranks of a peer."""

    source: Rank
    targets: list[Rank]

    def announce(self) -> list[RankDescriptor]:
        answers = [rank.links.open(OpenPeer("source")) for rank in self.targets]
        return [answer.descriptor for answer in answers if isinstance(answer, PeerOpened)]

    def connect(self, descriptors: Sequence[RankDescriptor]) -> list[WorkerToScheduler]:
        layout = encode_layout(self.targets[0].layout.server)
        return self.source.links.connect(ConnectPeer("target", layout, list(descriptors)))

    def connected(self) -> None:
        assert self.connect(self.announce()) == []
        assert self.source.wait_for(1) == [PeerConnected("target", 0, "posix", "direct")]

    def close(self) -> None:
        for rank in (self.source, *self.targets):
            rank.transport.close()


def make_world(
    target_tp: int, target_page_size: int, page_count: int = 32, layer_group_count: int = 1
) -> World:
    source = server_layout(tp_size=1, page_size=8, layer_group_count=layer_group_count)
    target = server_layout(tp_size=target_tp, page_size=target_page_size)
    return World(
        Rank.start(source.rank(0, 0), page_count),
        [Rank.start(layout, page_count) for layout in target.ranks],
    )


@pytest.fixture
def world() -> Iterator[World]:
    """A source of TP 1 and pages of 8, and a peer of TP 2 and pages of 4."""
    world = make_world(2, 4)
    yield world
    world.close()


def send_of(send_id: int, start: int, stop: int, **changes: object) -> WholeSend:
    values: dict[str, object] = {
        "send_id": send_id,
        "step_id": 0,
        "transfer_id": 70,
        "peer": "target",
        "token_start": start,
        "token_stop": stop,
        "is_final": stop == TOKENS,
        "source_pages": [(0, [7, 2, 31, 4, 18, 9])],
        "target_pages": [(0, [5, 1, 30, 12, 13, 14, 2, 9, 20, 21, 22, 8])],
        **changes,
    }
    return WholeSend(**values)  # type: ignore[arg-type]


def fill(rank: Rank, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in rank.pool.buffers:
        values = torch.randn(buffer.numel() // 4, generator=generator)
        buffer.view(torch.float32).copy_(values)


def test_a_send_reaches_every_target_rank_and_touches_nothing_else(world: World) -> None:
    world.connected()
    fill(world.source, 0)
    before = []
    for index, rank in enumerate(world.targets):
        fill(rank, 1 + index)
        before.append(rank.pool.buffers[0].clone())
    pieces = [(0, 11), (11, 32), (32, TOKENS)]
    for send_id, (start, stop) in enumerate(pieces):
        assert send_whole(world.source.sends, send_of(send_id, start, stop)) == []
    settled = world.source.wait_for(3)
    assert [m.error for m in settled if isinstance(m, SendSettled)] == ["", "", ""]
    nbytes = sum(message.nbytes for message in settled if isinstance(message, SendSettled))
    assert nbytes == TOKENS * world.source.layout.groups[0].page_nbytes // 8
    assert world.source.sends.open_count == 0

    # Oracle: element by element through the pools' own views, into copies of what was there.
    source_pages = send_of(0, 0, 1).source_pages[0][1]
    target_pages = send_of(0, 0, 1).target_pages[0][1]
    for rank, buffer in zip(world.targets, before, strict=True):
        expected = KvPool(rank.layout, [32], [buffer])
        for component in ("k", "v"):
            for layer in range(3):
                held = world.source.pool.view(component, layer)
                wanted = expected.view(component, layer)
                for token in range(TOKENS):
                    for unit in range(2):
                        head = rank.layout.tp_rank * 2 + unit
                        wanted[target_pages[token // 4], unit, token % 4] = held[
                            source_pages[token // 8], head, token % 8
                        ]
        assert torch.equal(rank.pool.buffers[0], expected.buffers[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source_pages": [(0, [7, 33])]}, "source page 33 of group 0: must be in 1..32"),
        ({"source_pages": [(0, [7, 0])]}, "source page 0 of group 0"),
        ({"source_pages": [(0, [7, 7])]}, "source page 7 of group 0 is named twice"),
        ({"target_pages": [(0, [1, 2**40])]}, f"target page {2**40} of group 0"),
        ({"target_pages": [(0, [-1, 1])]}, "target page -1 of group 0"),
        ({"target_pages": [(0, [3, 4, 3])]}, "target page 3 of group 0 is named twice"),
        ({"target_pages": []}, "target pages of 0 page groups: there are 1"),
        ({"source_pages": [(0, [1]), (0, [1])]}, "source pages of 2 page groups: there are 1"),
        ({"peer": "other"}, "peer other is not connected"),
    ],
)
def test_a_send_that_can_not_be_done_settles_at_once(
    world: World, changes: dict[str, object], named: str
) -> None:
    world.connected()
    before = [rank.pool.buffers[0].clone() for rank in world.targets]
    settled = send_whole(world.source.sends, send_of(1, 0, 8, **changes))
    assert len(settled) == 1 and named in settled[0].error
    assert (settled[0].nbytes, settled[0].is_quiet, settled[0].rank) == (0, True, 0)
    for rank, buffer in zip(world.targets, before, strict=True):
        assert torch.equal(rank.pool.buffers[0], buffer)


def test_a_send_without_bytes_settles_at_once_and_well(world: World) -> None:
    world.connected()
    settled = send_whole(world.source.sends, send_of(1, 8, 8))
    assert [(message.error, message.nbytes) for message in settled] == [("", 0)]


def test_a_send_while_connecting_is_answered(world: World) -> None:
    assert world.connect(world.announce()) == []
    assert send_whole(world.source.sends, send_of(1, 0, 8))[0].error == "peer target is connecting"


def test_a_lost_rank_fails_the_peer_once_and_its_sends_settle(world: World) -> None:
    world.connected()
    world.targets[1].transport.close()
    messages = world.source.wait_for(1)
    assert [type(message) for message in messages] == [PeerFailed]
    failed = messages[0]
    assert isinstance(failed, PeerFailed) and failed.reason.startswith("target/1: ")
    settled = send_whole(world.source.sends, send_of(1, 0, 8))
    assert "peer target is failed" in settled[0].error
    assert world.source.links.close("target") == []
    assert world.source.wait_for(1) == [PeerClosed("target", 0)]


def test_closing_settles_open_sends_before_it_is_reported(world: World) -> None:
    world.connected()
    for send_id in range(8):
        assert send_whole(world.source.sends, send_of(send_id, 0, TOKENS)) == []
    assert world.source.links.close("target") == []
    assert world.source.links.close("target") == []  # asked twice, answered once
    messages = world.source.wait_for(9)
    assert [type(message) for message in messages] == [SendSettled] * 8 + [PeerClosed]
    assert world.source.links.close("target") == [PeerClosed("target", 0)]


def test_a_cancelled_transfer_settles_once_and_is_quiet() -> None:
    world = make_world(1, 8, page_count=10_000)
    try:
        world.connected()
        fill(world.source, 3)
        # 10,000 runs each, so that the cancel finds some of the pages not yet issued.
        scattered = list(range(9_999, 0, -2)) + list(range(10_000, 0, -2))
        ascending = list(range(1, 10_001))
        for send_id in (1, 2):
            send = send_of(
                send_id,
                0,
                80_000,
                transfer_id=70 + send_id,
                source_pages=[(0, scattered)],
                target_pages=[(0, ascending)],
            )
            assert send_whole(world.source.sends, send) == []
        world.source.sends.cancel(CancelSends(71))
        world.source.sends.cancel(CancelSends(99))  # of no transfer
        settled = {m.send_id: m for m in world.source.wait_for(2) if isinstance(m, SendSettled)}
        assert settled[1].error in (CANCELLED, "") and settled[1].is_quiet
        assert settled[2].error == "" and world.source.sends.open_count == 0
        rows = world.source.pool.buffers[0].view(10_001, -1)
        assert torch.equal(world.targets[0].pool.buffers[0].view(10_001, -1)[1:], rows[scattered])
    finally:
        world.close()


def test_layer_groups_leave_as_they_are_computed_and_the_last_is_exposed() -> None:
    world = make_world(2, 4, layer_group_count=2)
    try:
        world.connected()
        fill(world.source, 3)
        sends = world.source.sends
        assert send_whole(sends, send_of(1, 0, TOKENS, step_id=5)) == []
        assert sends.apply_computed(Computed(4, 2)) == []  # the step before
        assert not any(rank.pool.buffers[0].any() for rank in world.targets)
        assert sends.apply_computed(Computed(5, 1)) == []
        while sends.open_count and not sends.is_idle:
            assert world.source.wait() == []
        half = [int(rank.pool.buffers[0].count_nonzero()) for rank in world.targets]
        assert sends.apply_computed(Computed(5, 2)) == []
        (settled,) = world.source.wait_for(1)
        assert isinstance(settled, SendSettled) and settled.error == ""
        assert 0 < settled.exposed_nbytes < settled.nbytes
        full = [int(rank.pool.buffers[0].count_nonzero()) for rank in world.targets]
        assert all(0 < before < after for before, after in zip(half, full, strict=True))
    finally:
        world.close()


def test_what_was_cached_leaves_before_the_first_chunk_and_the_rest_after_it(world: World) -> None:
    """A Send of no step needs no step of the engine, not even the first one."""
    world.connected()
    assert send_whole(world.source.sends, send_of(1, 0, 16, step_id=0)) == []
    assert send_whole(world.source.sends, send_of(2, 16, TOKENS, step_id=7)) == []
    (first,) = world.source.wait_for(1)
    assert isinstance(first, SendSettled) and (first.send_id, first.error) == (1, "")
    assert world.source.sends.open_count == 1 and world.source.sends.is_idle
    assert world.source.sends.apply_computed(Computed(7, 1)) == []
    (second,) = world.source.wait_for(1)
    assert isinstance(second, SendSettled) and (second.send_id, second.error) == (2, "")
    assert first.nbytes * (TOKENS - 16) == second.nbytes * 16


def test_a_send_that_waits_for_the_engine_can_be_cancelled(world: World) -> None:
    world.connected()
    assert send_whole(world.source.sends, send_of(1, 0, TOKENS, step_id=5)) == []
    (settled,) = world.source.sends.cancel(CancelSends(70))
    assert (settled.error, settled.is_quiet, settled.nbytes) == (CANCELLED, True, 0)
    assert world.source.sends.apply_computed(Computed(5, 1)) == []
    assert world.source.sends.open_count == 0


def test_closing_a_peer_settles_what_waits_for_the_engine(world: World) -> None:
    world.connected()
    assert send_whole(world.source.sends, send_of(1, 0, TOKENS, step_id=5)) == []
    (settled,) = world.source.sends.cancel_peer("target", "the peer is closed")
    assert settled.error == "the peer is closed" and world.source.sends.open_count == 0


def test_the_rank_that_did_not_announce_itself_is_named(world: World) -> None:
    messages = world.connect(world.announce()[:1])
    assert messages == [PeerFailed("target", 0, "rank 1 of the peer did not announce itself")]
    assert world.source.links.close("target") == [PeerClosed("target", 0)]


def test_an_announcement_that_does_not_fit_the_cache_is_refused(world: World) -> None:
    good = world.announce()
    region = good[0].regions[0]
    doubled = RankDescriptor(0, good[0].worker_address, [region, region], good[0].probe)
    messages = world.connect([doubled, good[1]])
    assert (
        isinstance(messages[0], PeerFailed) and "2 regions for 1 page groups" in messages[0].reason
    )
    messages = world.source.links.connect(ConnectPeer("other", b"\xc1", good))
    assert isinstance(messages[0], PeerFailed) and "layout can't be read" in messages[0].reason


def test_opening_twice_gives_the_same_place_and_closing_a_new_one(world: World) -> None:
    first, second = world.announce(), world.announce()
    assert first == second
    for rank in world.targets:
        assert rank.links.close("source") == [PeerClosed("source", rank.layout.index)]
    assert [rank.rank for rank in world.announce()] == [0, 1]


def test_an_outbox_wakes_its_reader_and_keeps_the_order() -> None:
    outbox = EngineOutbox()
    assert outbox.take() == []
    messages = [PeerClosed(str(index), 0) for index in range(3)]
    for message in messages:
        outbox.put(message)
    outbox.end()
    assert os.eventfd_read(outbox.fileno()) == 4  # the descriptor was readable
    os.eventfd_write(outbox.fileno(), 1)
    assert outbox.take() == [*messages, None]
    assert outbox.take() == []
    outbox.close()
