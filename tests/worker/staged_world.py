"""Ranks that stage over real UCX and real ZMQ in one process, turned by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.channel.poller import Poller
from common.clock import SystemClock
from common.config import TransferMode
from common.engine.cache.cast import CACHE_DTYPES, cast
from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.families import gqa_components
from common.planner.link_cost import CopyCost, CopyCosts
from common.protocol.codec import encode_layout
from common.protocol.worker import ConnectPeer, Expect, OpenPeer, PeerOpened, WorkerToScheduler
from common.transport.copies import copy_runs
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    TransferSettled,
)
from common.transport.ucx import UcxSettings, UcxTransport
from common.worker.peer_links import PeerLinks
from common.worker.pools import allocate_pool, allocate_region
from common.worker.sends import Sends
from common.worker.staging.copier import Copier
from common.worker.staging.gather_buffers import GatherBuffers
from common.worker.staging.io import StagingIo
from common.worker.staging.source import REGION as SOURCE_REGION
from common.worker.staging.source import StagingSource
from common.worker.staging.target import REGION as TARGET_REGION
from common.worker.staging.target import StagingTarget
from tests.worker.whole_send import WholeSend

WAIT_S = 30.0
CPU = torch.device("cpu")
PAGE_COUNT = 64
BUFFER_NBYTES = 1 << 16


def server_layout(
    tp: int = 1, page_size: int = 8, dtype: str = "float32", *, groups: int = 1, head_dim: int = 32
) -> ServerLayout:
    components = gqa_components(layer_count=3, kv_head_count=4, head_dim=head_dim, dtype=dtype)
    return ServerLayout(components, tp, ((0, 3),), page_size, groups)


def page_counts(layout: RankLayout) -> list[int]:
    return [PAGE_COUNT] * len(layout.groups)


@dataclass
class Rank:
    """What the I/O thread of one rank owns; each is a source or a target."""

    layout: RankLayout
    transport: UcxTransport
    pool: KvPool
    staging_target: StagingTarget | None
    staging_source: StagingSource | None
    links: PeerLinks = field(init=False)
    sends: Sends = field(init=False)
    io: StagingIo = field(init=False)
    messages: list[WorkerToScheduler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = PeerLinks(
            self.transport, self.layout, self.staging_target, self.staging_source
        )
        self.sends = Sends(
            self.transport, self.links, self.layout, page_counts(self.layout), self.staging_source
        )
        self.io = StagingIo(
            self.sends, self.links, self.staging_target, self.staging_source, SystemClock()
        )

    @staticmethod
    def source(layout: RankLayout, tls: str, buffer_count: int = 4) -> Rank:
        transport, pool = _start(layout, tls)
        region = allocate_region(transport, SOURCE_REGION, buffer_count * BUFFER_NBYTES, CPU)
        copier = Copier(pool.buffers, copy_runs)
        source = StagingSource(
            transport,
            GatherBuffers(region, len(layout.groups), BUFFER_NBYTES, copier),
            copies=CopyCosts(CopyCost(2e-6, 5e9), CopyCost(2e-6, 5e9)),
            clock=SystemClock(),
        )
        return Rank(layout, transport, pool, None, source)

    @staticmethod
    def target(layout: RankLayout, tls: str, slot_count: int = 16) -> Rank:
        transport, pool = _start(layout, tls)
        region = allocate_region(transport, TARGET_REGION, slot_count * BUFFER_NBYTES, CPU)
        copier = Copier(pool.buffers, copy_runs)
        target = StagingTarget(region, copier, layout, page_counts(layout), "127.0.0.1")
        return Rank(layout, transport, pool, target, None)

    def turn(self) -> None:
        """What the I/O loop does once; nothing waits here."""
        for event in self.transport.poll():
            match event:
                case TransferSettled():
                    if self.io.apply_settled(event):
                        self.messages += self.io.take()
                    else:
                        self.messages += self.sends.apply_settled(event)
                case ConnectionMade():
                    self.messages += self.links.apply_connected(event)
                case ConnectionFailed() | ConnectionClosed():
                    messages = self.links.apply_gone(event)
                    self.messages += [*self.io.take(), *messages]
        self.messages += self.io.receive()

    def close(self) -> None:
        self.io.close()
        self.transport.close()


def _start(layout: RankLayout, tls: str) -> tuple[UcxTransport, KvPool]:
    transport = UcxTransport(UcxSettings(tls=tls))
    return transport, allocate_pool(transport, layout, page_counts(layout), CPU)


@dataclass
class World:
    """One source rank and the target ranks of a peer. stalled: targets that are not turned."""

    source: Rank
    targets: list[Rank]
    transfer_mode: TransferMode = TransferMode.STAGED
    stalled: bool = False

    @staticmethod
    def make(
        source: ServerLayout,
        target: ServerLayout,
        tls: str = "posix,tcp",
        transfer_mode: TransferMode = TransferMode.STAGED,
        slot_count: int = 16,
    ) -> World:
        return World(
            Rank.source(source.ranks[0], tls),
            [Rank.target(rank, tls, slot_count) for rank in target.ranks],
            transfer_mode,
        )

    def turn(self) -> None:
        ranks = [self.source] if self.stalled else [self.source, *self.targets]
        poller = Poller()
        for rank in ranks:
            poller.register(rank.transport.fileno())
            poller.register(rank.io)
        poller.poll(0.05)
        for rank in ranks:
            rank.turn()

    def wait_for(self, count: int) -> list[WorkerToScheduler]:
        """The next messages of the source rank to its scheduler."""
        end_at = SystemClock().now() + WAIT_S
        while len(self.source.messages) < count:
            assert SystemClock().now() < end_at, f"only {self.source.messages} of {count}"
            self.turn()
        messages, self.source.messages = self.source.messages, []
        return messages

    def connect(self) -> list[WorkerToScheduler]:
        layout = encode_layout(self.source.layout.server)
        opened = [
            rank.links.open(OpenPeer("source", layout=layout, transfer_mode=self.transfer_mode))
            for rank in self.targets
        ]
        ranks = [answer.descriptor for answer in opened if isinstance(answer, PeerOpened)]
        assert len(ranks) == len(opened), opened
        theirs = encode_layout(self.targets[0].layout.server)
        message = ConnectPeer("target", theirs, ranks, self.transfer_mode)
        self.source.messages += self.source.links.connect(message)
        return self.wait_for(1)

    def expect(self, transfer_id: int, token_count: int, pages: Sequence[int]) -> None:
        for rank in self.targets:
            assert rank.staging_target is not None
            rank.staging_target.expect(
                Expect(transfer_id, "source", token_count, [(0, list(pages))])
            )

    def close(self) -> None:
        for rank in (self.source, *self.targets):
            rank.close()


def send_of(
    send_id: int,
    token_count: int,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    transfer_id: int = 70,
) -> WholeSend:
    return WholeSend(
        send_id=send_id,
        step_id=0,
        transfer_id=transfer_id,
        peer="target",
        token_start=0,
        token_stop=token_count,
        is_final=True,
        source_pages=[(0, list(source_pages))],
        target_pages=[(0, list(target_pages))],
    )


def fill(rank: Rank, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = CACHE_DTYPES[rank.layout.server.components[0].dtype]
    buffer = rank.pool.buffers[0].view(dtype)
    buffer.copy_(cast(torch.randn(buffer.shape, generator=generator), dtype))


def after_transfer(
    source: Rank,
    target: Rank,
    before: torch.Tensor,
    token_count: int,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
) -> torch.Tensor:
    """What a target's pool must hold, element by element through the pools' own views.

    before: its bytes before the transfer; they are written to.
    """
    expected = KvPool(target.layout, [PAGE_COUNT], [before])
    source_size, target_size = (rank.layout.server.page_size for rank in (source, target))
    dtype = CACHE_DTYPES[target.layout.server.components[0].dtype]
    for component in ("k", "v"):
        for layer in range(3):
            held = source.pool.view(component, layer)
            wanted = expected.view(component, layer)
            unit_count = wanted.shape[1]
            first = target.layout.tp_rank * unit_count
            for token in range(token_count):
                row = held[source_pages[token // source_size], :, token % source_size]
                wanted[target_pages[token // target_size], :, token % target_size] = cast(
                    row[first : first + unit_count].contiguous(), dtype
                )
    return expected.buffers[0]
