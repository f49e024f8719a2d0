"""What fails below the transport: the peer is lost, or the transport says that its process can't go
on. Nothing is ever silent."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.transport.transport import ConnectionFailed, ConnectionMade, TransferSettled
from tests.transport.cuda_ranks import NBYTES, Rank, connect, copy, settle, submit, wait_for
from tests.transport.process_faults import ILLEGAL_ADDRESS, UCX_IO_ERROR, Faults
from tests.transport.transport_pair import GUARD_NBYTES, Pair, plan_of, plan_volume, unique
from tests.transport.transport_servant import Remote

pytestmark = pytest.mark.slow


@pytest.fixture
def faults(libraries: Path, tmp_path: Path) -> Faults:
    return Faults(libraries, tmp_path / "faults")


@pytest.fixture
def writer(faults: Faults) -> Iterator[Remote]:
    """A servant over tcp in which calls can fail."""
    remote = Remote("tcp", environment=faults.environment)
    remote.call("allocate", "pages", GUARD_NBYTES)
    yield remote
    remote.exit()


def connected(writer: Remote, pair: Pair) -> str:
    peer = f"peer{next(unique)}"
    event = writer.call("connect", peer, pair.remote.open_target(peer, ["pool", "tail"]))
    assert isinstance(event, ConnectionMade)
    return peer


# The progress thread ------------------------------------------------------------------------------


def test_a_progress_thread_that_cannot_wait_breaks_the_transport_with_the_reason(
    writer: Remote, faults: Faults
) -> None:
    faults.set("epoll_wait", errno.ENOMEM)
    writer.post("open_target", "anybody")  # wakes it, and may be answered before it waits again
    writer.reply_or_failure()
    text = writer.failure_of("events", 10.0)
    assert text == "TransportBroken: epoll_wait: Cannot allocate memory"
    for name, *arguments in (("events", 0.0), ("open_target", "another")):
        assert "epoll_wait: Cannot allocate memory" in writer.failure_of(name, *arguments)


def test_a_device_that_has_failed_breaks_the_transport(source: Rank, target: Rank) -> None:
    """As after a kernel that wrote where it must not: every call of the context returns an error,
    and no copy ever ends."""
    peer = connect(source, target)
    source.driver.set("event_query", ILLEGAL_ADDRESS)
    source.driver.set("add_callback", ILLEGAL_ADDRESS)
    submit(source, peer, (0, 0, 0, 0, NBYTES))
    assert "TransportBroken: ucp_worker_arm" in source.remote.failure_of("events", 10.0)


# A flush that fails alone -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flush", "late_flush"])
def test_a_flush_that_fails_alone_loses_its_peer(
    pair: Pair, writer: Remote, faults: Faults, kind: str, tls: str
) -> None:
    """Without a flush it is unknown whether its bytes have arrived. Only the target's fence
    ends that, and the fence takes a lost peer."""
    if "tcp" not in tls:
        pytest.skip("nothing is flushed by UCX")
    peer, other = connected(writer, pair), connected(writer, pair)
    faults.set(kind, UCX_IO_ERROR)
    writer.call("submit", peer, plan_volume(GUARD_NBYTES), 1)
    settled = writer.call("settle", 1)
    assert isinstance(settled, TransferSettled)
    assert settled.error == "flush: Input/output error" and not settled.is_quiet
    lost = writer.call("last_event", peer)
    assert lost == ConnectionFailed(peer, "flush: Input/output error")
    faults.reset()
    writer.call("submit", other, plan_of((0, 0, 0, 0, 8)), 2)
    settled = writer.call("settle", 2)
    assert isinstance(settled, TransferSettled) and settled.error is None


# A put that fails alone ---------------------------------------------------------------------------


def test_a_put_that_fails_alone_settles_when_no_copy_of_it_runs(source: Rank, target: Rank) -> None:
    """UCX does not follow a copy whose event could not be recorded, but the device makes it."""
    peer = connect(source, target)
    source.driver.set("event_record", 1)
    source.driver.set("hold", 1)
    tag = submit(source, peer, (0, 0, 0, 0, NBYTES))
    wait_for(lambda: source.driver.get("asked_count") == 1)
    assert source.remote.call("events", 0.5) == []
    source.driver.reset()
    settled = settle(source, tag)
    assert settled.error == "put: Input/output error"
    assert source.driver.get("copy_count") == 1, "it was made before it was said to be over"
    assert source.remote.call("last_event", peer) == ConnectionFailed(
        peer, "put: Input/output error"
    )
    again = connect(source, target)
    assert copy(source, again, (0, 0, 0, 4096, 8)).error is None


def test_a_device_that_answers_with_an_error_then_breaks_the_transport(
    source: Rank, target: Rank
) -> None:
    peer = connect(source, target)
    source.driver.set("synchronize", ILLEGAL_ADDRESS)
    source.driver.set("memcpy_async", ILLEGAL_ADDRESS)
    submit(source, peer, (0, 0, 0, 0, NBYTES))
    text = source.remote.failure_of("events", 10.0)
    assert text == "TransportBroken: cuCtxSynchronize failed with CUDA driver error 700"


# A connection that does not close -----------------------------------------------------------------


def test_a_copy_that_never_ends_keeps_its_transfer_open_and_breaks_the_transport_in_time(
    source: Rank, target: Rank
) -> None:
    """Nothing but the end of the process proves that it does not run any more."""
    peer = connect(source, target)
    source.driver.set("hold", 1)
    submit(source, peer, (0, 0, 0, 0, NBYTES))
    wait_for(lambda: source.driver.get("asked_count") == 1)
    source.remote.call("start_disconnecting", peer)
    text = source.remote.failure_of("events", 10.0)
    assert "TransportBroken: 1 transfer of a closed connection did not end within 1 s" in text
