"""A decode server that says what a test wants: real sockets, real memory, no scheduler of its own.

It shakes hands with a prefill server honestly, and beats while it waits, so that what it claims
afterwards is judged as any connected peer's claim.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.channel.peer import PeerDialer
from common.channel.sockets import SendResult
from common.engine.loader import read_served_config
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.protocol.codec import decode_peer_message, encode, encode_layout
from common.protocol.descriptor import RankDescriptor
from common.protocol.handshake import expected_writers
from common.protocol.peer import (
    Attach,
    Attached,
    DecodeToPrefill,
    Heartbeat,
    Hello,
    PrefillToDecode,
    TransferRequest,
    Welcome,
)
from common.request import SamplingParams
from common.transport.stream import StreamTransport
from common.transport.ucx import UcxSettings, UcxTransport
from tests.e2e.fleet import Node, wait_until

PAGE_COUNT = 64  # of every group

M = TypeVar("M", bound=PrefillToDecode)


class RawDecode:
    """One rank with pages of every group, connected as soon as the `with` block begins."""

    def __init__(
        self,
        prefill: Node,
        checkpoint: Path,
        layer_count: int,
        page_size: int,
        tls: str = "posix",
    ) -> None:
        """tls: the UCX transports that its memory can be reached over, or "stream"."""
        self._link = prefill.bootstrap
        self._fingerprint: dict[str, str] = prefill.get("/server_info").json()["fingerprint"]
        config = read_served_config(checkpoint, dtype="float32")
        components = cache_components(config, "auto")
        self.layout = ServerLayout(components, 1, ((0, layer_count),), page_size)
        self.incarnation = secrets.token_hex(8)
        self.pages: list[NDArray[np.uint8]] = []  # uint8[page, byte] of each group
        self._tls = tls
        self._beat_count = 0
        self._inbox: list[PrefillToDecode] = []

    def __enter__(self) -> RawDecode:
        self._dialer = PeerDialer()
        self._transport = self._open_transport()
        self._dialer.dial(self._link)
        layout = encode_layout(self.layout)
        self.say(Hello(1, 1, "decode", self.incarnation, self._fingerprint, layout))
        self.welcome = self.wait_for(Welcome)
        for group in self.layout.ranks[0].groups:
            nbytes = PAGE_COUNT * group.page_nbytes
            region = self._transport.allocate(group.group.name, nbytes)
            assert region.view is not None
            self.pages.append(region.view.reshape(PAGE_COUNT, group.page_nbytes))
        target = self._transport.open_target("prefill")
        regions, probe = (
            [(r.name, r.address, r.nbytes, r.key) for r in found]
            for found in (target.regions, [target.probe])
        )
        rank = RankDescriptor(
            rank=0,
            worker_address=target.worker_address,
            regions=regions,
            probe=probe[0],
            stream_address=target.stream_address,
        )
        self.say(Attach(self.incarnation, self.welcome.incarnation, [rank]))
        self.wait_for(Attached)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._dialer.close()
        self._transport.close()

    def _open_transport(self) -> UcxTransport | StreamTransport:
        if self._tls == "stream":
            return StreamTransport()
        return UcxTransport(UcxSettings(tls=self._tls))

    def say(self, message: DecodeToPrefill) -> None:
        self.say_bytes(encode(message))

    def say_bytes(self, payload: bytes) -> None:
        """What no codec of ours would send."""

        def is_sent() -> bool:
            return self._dialer.send(self._link, payload) is SendResult.SENT

        wait_until("a message to be sent", is_sent)

    def wait_for(self, kind: type[M]) -> M:
        """The next message of a kind; others that come before it are dropped."""
        found: list[M] = []

        def has_come() -> bool:
            while self._inbox and not found:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    found.append(message)
            return bool(found)

        self.beat_until(kind.__name__, has_come)
        return found[0]

    def beat_until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait as a peer that lives: beat, and keep what comes."""

        def beat() -> bool:
            self._beat_count += 1
            message = Heartbeat(self.incarnation, self._beat_count, 0, is_busy=False)
            self._dialer.send(self._link, encode(message))
            self._inbox += [decode_peer_message(p) for _, p in self._dialer.receive()]
            return is_so()

        wait_until(what, beat)

    def reserve(self, transfer_id: int, source: ServerLayout, prompt: list[int]) -> TransferRequest:
        """An honest reservation of the pages 1, 2, 3, ... of every group. source: the writer's."""
        groups = self.layout.groups
        needed = [group.page_indices(group.live.items(len(prompt))) for group in groups]
        return TransferRequest(
            transfer_id=transfer_id,
            incarnation=self.incarnation,
            peer_incarnation=self.welcome.incarnation,
            token_count=len(prompt),
            pages=[(pages.start, list(range(1, len(pages) + 1))) for pages in needed],
            budget_ms=60_000,
            writers=expected_writers(source, self.layout),
            token_ids=prompt,
            prompt_count=len(prompt),
            sampling=SamplingParams(max_new_tokens=4, seed=0, temperature=0.0),
        )
