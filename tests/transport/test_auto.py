"""UCX where it reaches a target, a stream where it does not, and words where neither does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from common.errors import TransportError
from common.transport.transport import ConnectionMade
from tests.transport.transport_pair import GUARD_NBYTES, plan_of, start_remote
from tests.transport.transport_servant import Remote, Writer


@pytest.fixture(scope="module")
def remotes() -> Iterator[dict[str, Remote]]:
    remotes = {kind: start_remote(kind) for kind in ("auto", "stream", "tcp")}
    yield remotes
    for remote in remotes.values():
        remote.exit()


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer("auto")
    view = writer.transport.allocate("source", GUARD_NBYTES).view
    assert view is not None
    view[:] = 0x77
    yield writer
    writer.transport.close()


def copied(writer: Writer, remote: Remote, peer: str) -> bool:
    remote.call("fill", "tail", 0)
    assert writer.copy(peer, plan_of((0, 0, 0, 0, GUARD_NBYTES)), 1).error is None
    return bool(np.all(remote.read("tail") == 0x77))


def test_what_shared_memory_reaches_goes_that_way(
    writer: Writer, remotes: dict[str, Remote]
) -> None:
    descriptor = remotes["auto"].open_target("shared", ["tail"])
    assert writer.connect("peer", descriptor) == ConnectionMade("peer", "posix")
    assert copied(writer, remotes["auto"], "peer")


@pytest.mark.parametrize("elsewhere", [b"", None])
def test_what_it_does_not_reach_goes_over_a_stream(
    writer: Writer, remotes: dict[str, Remote], elsewhere: bytes | None
) -> None:
    """A target without UCX, and one whose UCX can only be reached by tcp."""
    if elsewhere is None:
        elsewhere = remotes["tcp"].open_target("far", ["tail"]).worker_address
    descriptor = remotes["stream"].open_target(f"streamed{len(elsewhere)}", ["tail"])
    descriptor = replace(descriptor, worker_address=elsewhere)
    assert writer.connect("peer", descriptor) == ConnectionMade("peer", "stream")
    assert copied(writer, remotes["stream"], "peer")


def test_what_neither_reaches_is_said(writer: Writer, remotes: dict[str, Remote]) -> None:
    descriptor = remotes["tcp"].open_target("nobody", ["tail"])
    with pytest.raises(TransportError, match="reached by nothing that this side may use"):
        writer.transport.connect("peer", descriptor)
    good = remotes["auto"].open_target("somebody", ["tail"])
    assert isinstance(writer.connect("peer", good), ConnectionMade), "the name is free"


def test_a_stream_is_asked_for_where_only_ucx_is(remotes: dict[str, Remote]) -> None:
    writer = Writer("posix")
    try:
        with pytest.raises(TransportError, match="reached by streams only"):
            writer.transport.connect("peer", remotes["stream"].open_target("other", ["tail"]))
    finally:
        writer.transport.close()
