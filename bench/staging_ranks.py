"""One source rank in this process and one target rank in a child, turned as their I/O threads are.

The parts are the real ones; only schedulers and models are missing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch
from torch import Tensor

from common.channel.poller import Poller
from common.clock import SystemClock
from common.config import Role, ServerConfig, TransferMode
from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import RankLayout, ServerLayout
from common.protocol.codec import decode_layout, encode_layout
from common.protocol.worker import (
    CloseTransfer,
    ConnectPeer,
    Expect,
    OpenPeer,
    OpenTransfer,
    PeerConnected,
    PeerOpened,
    Send,
    SendSettled,
    WorkerToScheduler,
)
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    TransferSettled,
)
from common.transport.ucx import UcxSettings, UcxTransport
from common.worker.peer_links import PeerLinks
from common.worker.pools import allocate_pool
from common.worker.sends import Sends
from common.worker.staging.io import StagingIo
from common.worker.staging.source import StagingSource
from common.worker.staging.start import start_source, start_target
from common.worker.staging.target import StagingTarget

PATIENCE_S = 120.0
TRANSFER = 1
CPU = torch.device("cpu")

Look = Callable[[Tensor, object], object]
"""(the target's pages, a question) -> the answer; sent to the other process, so of a module."""


class RankIo:
    """The state of the I/O thread of one rank."""

    def __init__(
        self,
        layout: RankLayout,
        role: Role,
        tls: str,
        page_count: int,
        device: torch.device = CPU,
    ) -> None:
        self.layout = layout
        cuda_device = (device.index or 0) if device.type == "cuda" else None
        self.transport = UcxTransport(UcxSettings(tls=tls, cuda_device=cuda_device))
        self.pool: KvPool = allocate_pool(self.transport, layout, [page_count], device)
        config = ServerConfig(
            role=role,
            model_path="",
            tokenizer_path="",
            served_model_name="",
            port=1,
            prefill=("127.0.0.1:1",),
        )
        clock = SystemClock()
        self.staging_source: StagingSource | None = start_source(
            config, self.transport, layout, self.pool, clock
        )
        self.staging_target: StagingTarget | None = start_target(
            config, self.transport, layout, self.pool
        )
        self.links = PeerLinks(self.transport, layout, self.staging_target, self.staging_source)
        self.sends = Sends(self.transport, self.links, layout, [page_count], self.staging_source)
        self.io = StagingIo(self.sends, self.links, self.staging_target, self.staging_source, clock)
        self.messages: list[WorkerToScheduler] = []
        self._poller = Poller()
        self._poller.register(self.transport.fileno())
        self._poller.register(self.io)

    def wake_on(self, fd: int) -> None:
        """`turn` returns when this descriptor is readable, too."""
        self._poller.register(fd)

    def turn(self, timeout_s: float) -> None:
        self._poller.poll(timeout_s)
        for event in self.transport.poll():
            match event:
                case TransferSettled():
                    if not self.io.apply_settled(event):
                        self.messages += self.sends.apply_settled(event)
                case ConnectionMade():
                    self.messages += self.links.apply_connected(event)
                case ConnectionFailed() | ConnectionClosed():
                    self.messages += self.links.apply_gone(event)
        self.messages += self.io.receive()

    def wait(self) -> WorkerToScheduler:
        end_at = time.monotonic() + PATIENCE_S
        while not self.messages:
            assert time.monotonic() < end_at, "nothing happens"
            self.turn(0.1)
        return self.messages.pop(0)

    def close(self) -> None:
        self.io.close()
        self.transport.close()


class StagedPair:
    """A source rank here and a target rank in a child, connected in one transfer mode."""

    def __init__(
        self,
        source: ServerLayout,
        target: ServerLayout,
        tls: str,
        transfer_mode: TransferMode,
        tokens: int,
        *,
        device: torch.device = CPU,
        look: Look | None = None,
    ) -> None:
        """tokens: that both pools hold. look: answers what `ask_target` asks."""
        self.target = target
        self.page_counts = (tokens // source.page_size, tokens // target.page_size)
        self.source = RankIo(source.ranks[0], Role.PREFILL, tls, self.page_counts[0], device)
        # Small numbers of any element type: what is moved is converted, not only copied.
        self.source.pool.buffers[0].random_(0, 0x3C)
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        arguments = (encode_layout(source), encode_layout(target), tls, transfer_mode, tokens, pipe)
        self._process = context.Process(
            target=serve_target, args=(*arguments, str(device), look), daemon=True
        )
        self._process.start()
        opened = self._pipe.recv()
        assert isinstance(opened, PeerOpened), opened
        message = ConnectPeer("target", encode_layout(target), [opened.descriptor], transfer_mode)
        self.source.messages += self.source.links.connect(message)
        connected = self.source.wait()
        assert isinstance(connected, PeerConnected), connected
        self.transfer_mode = connected.transfer_mode
        self._send_id = 0

    def sample(self, rng: np.random.Generator, token_count: int) -> tuple[float, int]:
        """Seconds of one transfer between random pages, and its number of puts."""
        lists = [
            (rng.permutation(count)[: token_count // layout.page_size] + 1).tolist()
            for count, layout in zip(
                self.page_counts, (self.source.layout.server, self.target), strict=True
            )
        ]
        return self.send(lists[0], lists[1], token_count)

    def send(
        self, source_pages: list[int], target_pages: list[int], token_count: int
    ) -> tuple[float, int]:
        """Seconds of one transfer between these pages, and its number of puts."""
        self._pipe.send(Expect(TRANSFER, "source", token_count, [(0, target_pages)]))
        assert self._pipe.recv() == "expected"
        self._send_id += 1
        send = Send(self._send_id, 0, TRANSFER, 0, token_count, is_final=True)
        pages = ([(0, source_pages)], [(0, target_pages)])
        start = time.perf_counter()
        self.source.sends.open(OpenTransfer(TRANSFER, "target", *pages))
        self.source.messages += self.source.sends.send(send)
        settled = self.source.wait()
        seconds = time.perf_counter() - start
        self.source.sends.close(CloseTransfer(TRANSFER))
        assert isinstance(settled, SendSettled) and not settled.error, settled
        return seconds, settled.run_count

    def ask_target(self, question: object) -> object:
        """The answer of the other process's `look` to a question about its pages."""
        self._pipe.send(question)
        answer: object = self._pipe.recv()
        return answer

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
        self.source.close()


def serve_target(
    source: bytes,
    target: bytes,
    tls: str,
    transfer_mode: TransferMode,
    tokens: int,
    pipe: Connection,
    device: str,
    look: Look | None,
) -> None:
    torch.set_num_threads(1)
    layout = decode_layout(target)
    page_count = tokens // layout.page_size
    rank = RankIo(layout.ranks[0], Role.DECODE, tls, page_count, torch.device(device))
    opened = rank.links.open(OpenPeer("source", source, "", transfer_mode))
    pipe.send(msgspec.structs.replace(opened) if isinstance(opened, PeerOpened) else opened)
    rank.wake_on(pipe.fileno())
    while True:
        rank.turn(None)  # type: ignore[arg-type]
        if not pipe.poll():
            continue
        message = pipe.recv()
        if message is None:
            break
        if not isinstance(message, Expect):
            assert look is not None
            pipe.send(look(rank.pool.buffers[0], message))
            continue
        assert rank.staging_target is not None
        rank.staging_target.expect(message)
        pipe.send("expected")
    rank.close()
