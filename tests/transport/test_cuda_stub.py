"""GPU memory between two processes over UCX's real CUDA IPC, with a stub driver below it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.transport.transport import ConnectionClosed
from tests.transport.cuda_ranks import NBYTES, Rank, connect, copy, wait_for

pytestmark = pytest.mark.slow


def test_runs_of_device_memory_land_byte_exact(source: Rank, target: Rank) -> None:
    peer = connect(source, target)
    settled = copy(source, peer, (0, 0, 0, 4096, 100), (0, 7, 0, 65_537, 30_001))
    assert (settled.error, settled.is_quiet, settled.nbytes) == (None, True, 30_101)
    expected = np.zeros(NBYTES, dtype=np.uint8)
    expected[4096:4196] = 0x11
    expected[65_537 : 65_537 + 30_001] = 0x11
    assert np.array_equal(target.remote.read("pages"), expected)
    assert source.driver.get("copy_count") >= 2, "the driver copied it"


def test_memory_of_a_killed_process_is_let_go_and_its_successors_is_opened(
    source: Rank, libraries: Path, tmp_path: Path
) -> None:
    """The writer would else keep the dead one's memory from being freed, until it ends itself."""
    for value in range(1, 4):
        target = Rank(libraries, tmp_path)
        source.remote.call("fill", "pages", value)
        peer = connect(source, target)
        assert copy(source, peer, (0, 0, 0, 0, NBYTES)).error is None
        assert np.all(target.remote.read("pages") == value)
        assert source.driver.get("handle_count") == 1
        target.remote.kill()
        source.remote.call("last_event", peer)
        wait_for(lambda: source.driver.get("handle_count") == 0)


def test_two_connections_to_one_process_end_one_by_one(source: Rank, target: Rank) -> None:
    kept, ended = connect(source, target), connect(source, target)
    assert copy(source, kept, (0, 0, 0, 0, 4096)).error is None
    assert copy(source, ended, (0, 0, 0, 8192, 4096)).error is None
    assert source.remote.call("disconnect", ended) == ConnectionClosed(ended)
    assert copy(source, kept, (0, 0, 0, 16_384, 4096)).error is None
    assert np.all(target.remote.read("pages")[16_384 : 16_384 + 4096] == 0x11)
