"""Who knows no secret writes nowhere, whatever is sent; and what is listened on at all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from common.transport.transport import ConnectionMade
from tests.transport.conftest import KINDS
from tests.transport.put_anywhere import PAYLOAD, dial, listening, put_anywhere, say
from tests.transport.transport_pair import Pair, plan_volume, start_remote, unique
from tests.transport.transport_servant import Remote

FILL = 0x11
LISTENING_COUNT = {"auto": 1, "posix": 0, "stream": 1, "stream-tls": 1}


@pytest.fixture(params=[kind for kind in KINDS if "tcp" not in kind])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def remote(kind: str) -> Iterator[Remote]:
    remote = start_remote(kind)
    remote.call("fill", "pool", FILL)
    yield remote
    remote.exit()


@pytest.mark.slow
def test_ucx_over_tcp_lets_strangers_write_anywhere() -> None:
    """Why it is never chosen by itself. Should this fail, UCX has learned to ask for keys."""
    remote = start_remote("tcp")
    address = remote.call("address", "pool")
    assert isinstance(address, int)
    remote.open_target("somebody", ["tail"])  # its pool is not announced
    for place in listening(remote.pid):
        put_anywhere(place, address)
    assert remote.read("pool")[: len(PAYLOAD)].tobytes() == PAYLOAD
    remote.exit()


@pytest.mark.slow
def test_strangers_write_nowhere(remote: Remote, kind: str) -> None:
    assert listening(remote.pid) == set(), "nothing before there is a target"
    remote.open_target("somebody")
    address = remote.call("address", "pool")
    assert isinstance(address, int)
    places = listening(remote.pid)
    assert [host for host, _ in places] == ["127.0.0.1"] * LISTENING_COUNT[kind]
    rng = random.Random(7)
    for place in places:
        put_anywhere(place, address)
        put_anywhere(place, 0x10)
        for size in (1, 7, 56, 57, 4096, 1 << 16):
            say(place, rng.randbytes(size))
    assert np.all(remote.read("pool") == FILL)


@pytest.mark.slow
def test_strangers_that_only_hold_on_keep_no_peer_out(kind: str) -> None:
    """Connections that say nothing are bounded, and a newer one takes the place of the oldest."""
    if "stream" not in kind:
        pytest.skip("no stream")
    pair = Pair(kind)
    try:
        peer = f"peer{next(unique)}"
        descriptor = pair.remote.open_target(peer)
        (place,) = listening(pair.remote.pid)
        holds = [dial(place) for _ in range(100)]
        assert isinstance(pair.writer.connect(peer, descriptor), ConnectionMade)
        assert pair.writer.copy(peer, plan_volume(1 << 20), tag=next(unique)).error is None
        for hold in holds:
            hold.close()
    finally:
        pair.close()
