"""Processes with a device of the stub driver, and what a test has them do to each other.

The test's own process must stay without a driver, so both ends are servants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from common.transport.transport import ConnectionMade, TransferSettled
from tests.transport.process_faults import Driver
from tests.transport.transport_pair import plan_of, unique
from tests.transport.transport_servant import Remote

TLS = "posix,cuda_copy,cuda_ipc"  # what is chosen where there is no RDMA
NBYTES = 1 << 20
PATIENCE_S = 10.0


class Rank:
    """A process with a device, its pool "pages", and its driver."""

    def __init__(self, libraries: Path, directory: Path) -> None:
        self.driver = Driver(libraries, directory / f"control-{next(unique)}")
        self.remote = Remote(TLS, 0, self.driver.environment)
        self.remote.call("register_cuda", "pages", NBYTES)

    def end(self) -> None:
        """What its driver was told before is undone."""
        self.driver.reset()
        self.remote.exit()


def connect(source: Rank, target: Rank) -> str:
    peer = f"peer{next(unique)}"
    event = source.remote.call("connect", peer, target.remote.open_target(peer, ["pages"]))
    assert isinstance(event, ConnectionMade), event
    assert "cuda_ipc" in event.transports.split(",")
    return peer


def submit(source: Rank, peer: str, *runs: tuple[int, int, int, int, int]) -> int:
    tag = next(unique)
    source.remote.call("submit", peer, plan_of(*runs), tag)
    return tag


def settle(source: Rank, tag: int) -> TransferSettled:
    settled = source.remote.call("settle", tag)
    assert isinstance(settled, TransferSettled)
    return settled


def copy(source: Rank, peer: str, *runs: tuple[int, int, int, int, int]) -> TransferSettled:
    return settle(source, submit(source, peer, *runs))


def wait_for(is_true: Callable[[], bool]) -> None:
    end_at = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end_at
