"""Peers that lie: whatever they say, and on whichever link, others' requests end as they should.

Every message passes the codec first, so it is one that bytes from a network can become. A liar
knows everything: incarnations, transfer ids, rooms, layouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import TransferMode
from common.errors import ProtocolError
from common.protocol import codec, peer
from common.protocol.descriptor import RankDescriptor
from common.protocol.peer import PeerMessage
from common.request import Bootstrap, SamplingParams, TransferTrace
from common.scheduling.events import FromPeer
from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

FUZZ = settings(
    max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Numbers that meet a bound, or that arithmetic trips over.
NUMBERS = (0, 1, 2, 3, 7, 8, 40, 64, 65, 512, 513, 2**16, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63)
PROMPT = list(range(20, 60))
ROOM = 77
ATTACHMENTS = (1, 1, 2)


class Draws:
    """Choices of one lie, from the numbers that hypothesis drew; the last one stays."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = list(numbers)

    def number(self) -> int:
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]

    def pick(self, *values: object) -> object:
        return values[self.number() % len(values)]

    def integer(self, *likely: int) -> int:
        values = (*likely, *likely, *NUMBERS)
        return values[self.number() % len(values)]

    def text(self, *likely: str) -> str:
        values = (*likely, *likely, "new", "x" * 128)
        return values[self.number() % len(values)]


def open_transfers(world: World) -> list[int]:
    """Ids of all transfers that the honest decode server knows of."""
    core = world.nodes["d0"].core
    assert isinstance(core, DecodeScheduler)
    return [one.transfer_id for one in core.transfers.incoming.under_way] or [5]


def lie_to_prefill(world: World, draws: Draws) -> PeerMessage:
    p0, d0 = world.nodes["p0"].facts, world.nodes["d0"].facts
    inc = draws.text(d0.incarnation, "x0-1", p0.incarnation)
    to = draws.text(p0.incarnation, p0.incarnation, inc)
    transfer = draws.integer(*open_transfers(world))
    match draws.number() % 6:
        case 0:
            layout = draws.pick(d0.layout_bytes, b"", b"\xc1", d0.layout_bytes[:-3])
            model = {"model": str(draws.pick("sim", "other"))}
            assert isinstance(layout, bytes)
            version = draws.integer(1, 1, 1)
            return peer.Hello(version, version, "decode", inc, model, layout)
        case 1:
            size = draws.integer(64 * 8 * 65)
            regions = [("r", draws.integer(0), size, b"k")] * (1 + draws.number() % 2)
            rank = RankDescriptor(draws.integer(0, 0), b"a", regions)
            return peer.Attach(inc, to, [rank], draws.integer(*ATTACHMENTS))
        case 2:
            count = draws.integer(40, 40)
            pages = list(range(1, 1 + min(count, 600) // 4))
            first = draws.integer(0, 0, 0)
            sampling = SamplingParams(max_new_tokens=1, seed=draws.integer(0, 0))
            room = draws.pick(ROOM, None, draws.integer(ROOM))
            assert room is None or isinstance(room, int)
            tokens = [] if room is not None else PROMPT[:count]
            return peer.TransferRequest(
                transfer, inc, to, count, [(first, pages)], draws.integer(0, 1000, 60_000),
                [0], room, tokens, draws.integer(40, 40), None if room is not None else sampling,
                attachment=draws.integer(*ATTACHMENTS),
            )  # fmt: skip
        case 3:
            return peer.Abort(transfer, inc, to, "a lie", is_closed=bool(draws.number() % 2))
        case 4:
            return peer.Heartbeat(inc, draws.integer(1), draws.integer(1), True, draws.integer(1))
        case _:
            return peer.Detached(inc, to, "a lie")


def lie_to_decode(world: World, draws: Draws) -> PeerMessage:
    p0, d0 = world.nodes["p0"].facts, world.nodes["d0"].facts
    inc = draws.text(p0.incarnation, "x0-1", d0.incarnation)
    to = draws.text(d0.incarnation, d0.incarnation, inc)
    transfer = draws.integer(*open_transfers(world))
    match draws.number() % 8:
        case 0:
            layout = draws.pick(p0.layout_bytes, b"", p0.layout_bytes[:-3])
            assert isinstance(layout, bytes)
            model = {"model": str(draws.pick("sim", "sim", "other"))}
            hosts = ["here"] * (1 + draws.number() % 2)
            return peer.Welcome(1, inc, model, layout, draws.integer(512), hosts, [1, 2])
        case 1:
            return peer.Refuse(inc, ["a lie"] * (draws.number() % 3))
        case 2:
            return peer.Attached(inc, to, ["tcp"], draws.integer(*ATTACHMENTS))
        case 3:
            return peer.Detached(inc, to, "a lie")
        case 4:
            count, first = draws.integer(40, 40), draws.integer(7, 8)
            writers = [draws.integer(0, 0, 0)]
            return peer.TransferDone(transfer, to, count, first, writers, TransferTrace())
        case 5:
            return peer.TransferFailed(transfer, to, "aborted", "a lie", 500, True)
        case 6:
            return peer.Quiesced(transfer, to)
        case _:
            return peer.Heartbeat(inc, draws.integer(1), draws.integer(1), True, draws.integer(1))


def told(node: Node, link: str, message: PeerMessage, decode: Callable[[bytes], object]) -> None:
    """Have a node hear a message, if it can come over a wire."""
    try:
        decode(codec.encode(message))
    except (ProtocolError, OverflowError):
        return
    node.feed(FromPeer(link, message))


def honest_pair(transfer_mode: TransferMode) -> World:
    """p0 and d0, both with a liar as a connected peer: x0 of p0 as decode, x1 of d0 as prefill."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("x1", "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1", "x1:1"]
    world.add("x0", "decode", 4, 64).links = ["p0:1"]
    for node in world.nodes.values():
        node.transfer_mode = transfer_mode
    world.begin(rest_at=2.0)
    return world


def ask(world: World, count: int) -> list[Client]:
    """Requests that only p0 can prefill: they name it, as a router's do."""
    asked: list[Client] = []
    for index in range(count):
        room = Bootstrap("p0", 1, ROOM + index)
        world.submit(world.nodes["p0"], PROMPT, 4, room)
        asked.append(world.submit(world.nodes["d0"], PROMPT, 4, room))
    return asked


LIE = st.lists(st.integers(0, 10_000), min_size=1, max_size=10)
LIES = st.lists(st.tuples(st.integers(0, 30), st.booleans(), LIE), min_size=1, max_size=20)
TRANSFER_MODES = st.sampled_from([TransferMode.DIRECT, TransferMode.STAGED])


@pytest.mark.slow
@FUZZ
@given(LIES, TRANSFER_MODES)
def test_lies_to_a_prefill_server_change_nothing_for_others(
    lies: list[tuple[int, bool, list[int]]], transfer_mode: TransferMode
) -> None:
    world = honest_pair(transfer_mode)
    asked = [world.submit(world.nodes["d0"], PROMPT, 4) for _ in range(3)]
    for delay_ms, is_peer, numbers in lies:
        world.run(world.now + delay_ms / 1000)
        message = lie_to_prefill(world, Draws(numbers))
        link = "x0" if is_peer else "nobody"
        told(world.nodes["p0"], link, message, codec.decode_peer_message)
    world.run(world.now + 25.0)
    for client in asked:
        assert client.finals == ["finished"], client.failure
        assert client.output == client.expected()


@pytest.mark.slow
@FUZZ
@given(LIES, TRANSFER_MODES)
def test_lies_to_a_decode_server_change_nothing_for_others(
    lies: list[tuple[int, bool, list[int]]], transfer_mode: TransferMode
) -> None:
    world = honest_pair(transfer_mode)
    asked = ask(world, 3)
    for delay_ms, is_peer, numbers in lies:
        world.run(world.now + delay_ms / 1000)
        message = lie_to_decode(world, Draws(numbers))
        link = "x1:1" if is_peer else "nobody:1"
        told(world.nodes["d0"], link, message, codec.decode_peer_message)
    world.run(world.now + 25.0)
    for client in asked:
        assert client.finals == ["finished"], client.failure
        assert client.output == client.expected()
