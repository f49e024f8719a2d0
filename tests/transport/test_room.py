"""A process that has no room left for UCX says so, and lives: UCX itself would end it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.environment import UCX_SHARED_MEMORY_VARIABLE
from common.errors import TransportError
from common.transport.room import WORKER_SHARED_NBYTES, check_shared_memory
from common.transport.transport import ConnectionClosed
from tests.transport.transport_pair import Pair, plan_volume, unique


@contextmanager
def no_file_left() -> Iterator[None]:
    """This process can't open one more file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_without_a_file_to_open_peers_can_be_left_and_new_ones_are_refused(pair: Pair) -> None:
    peer = pair.connect()
    late = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(late)
    with no_file_left():
        with pytest.raises(TransportError, match="file descriptors"):
            pair.transport.open_target("source")
        with pytest.raises(TransportError, match="file descriptors"):
            pair.transport.connect(late, descriptor)
        assert pair.writer.disconnect(peer) == ConnectionClosed(peer)
    again = pair.connect()
    assert pair.writer.copy(again, plan_volume(1 << 20), tag=next(unique)).error is None
    pair.transport.open_target("source")
    pair.transport.close_target("source")


def test_a_full_shared_memory_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        TransportError, match=r"x: nbytes=\d+ must fit in /dev/shm, which has 4096 "
    ):
        check_shared_memory("x", WORKER_SHARED_NBYTES)


def test_room_is_looked_for_where_ucx_makes_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UCX_SHARED_MEMORY_VARIABLE, str(tmp_path))
    with pytest.raises(TransportError, match=f"must fit in {tmp_path}, which has "):
        check_shared_memory("x", 1 << 60)
    monkeypatch.setenv(UCX_SHARED_MEMORY_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(TransportError, match=f"x: {tmp_path}/gone can't be used: No such file"):
        check_shared_memory("x", 1)
