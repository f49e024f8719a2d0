"""What every transport promises when transfers, peers and processes end, and what stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from common.planner.copy_plan import CopyPlan
from common.transport.fences import is_fenced_by_close
from common.transport.transport import (
    CANCELLED,
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    PlanOutOfBounds,
    TransferSettled,
    UnknownPeer,
)
from tests.transport.transport_pair import (
    GUARD_NBYTES,
    Pair,
    is_mapped,
    plan_of,
    plan_volume,
    start_remote,
    unique,
)
from tests.transport.transport_servant import Remote, Writer

STATE_TIMEOUT_S = 10.0

# How it ends --------------------------------------------------------------------------------------


def test_cancelled_transfer_settles_and_writes_nothing_afterwards(pair: Pair) -> None:
    peer = pair.connect()
    tag = next(unique)
    plan = plan_volume(4 << 30)
    pair.transport.submit(peer, plan, tag)
    pair.transport.cancel(tag)
    settled = pair.writer.settle(tag)
    assert settled.error == CANCELLED
    assert settled.is_quiet
    assert settled.nbytes < plan.total_nbytes
    pair.fill(0x99)
    # Another transfer over the same connection, flushed: whatever was under way has landed by then.
    assert pair.writer.copy(peer, plan_of((1, 0, 1, 0, 8)), tag=next(unique)).error is None
    assert np.all(pair.remote.read("pool") == 0x99)


def test_cancelling_one_transfer_leaves_the_others_alone(pair: Pair) -> None:
    peer = pair.connect()
    doomed, kept = next(unique), next(unique)
    pair.transport.submit(peer, plan_volume(4 << 30), doomed)
    pair.transport.submit(peer, plan_volume(8 << 20), kept)
    pair.transport.cancel(doomed)
    pair.transport.cancel(next(unique))
    assert pair.writer.settle(doomed).error == CANCELLED
    assert pair.writer.settle(kept).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


def test_disconnect_settles_open_transfers_before_it_reports_closed(pair: Pair) -> None:
    peer = pair.connect()
    tags = [next(unique) for _ in range(4)]
    for tag in tags:
        pair.transport.submit(peer, plan_volume(4 << 30), tag)
    pair.transport.disconnect(peer)
    assert pair.writer.last_event(peer) == ConnectionClosed(peer)
    settled = [event for event in pair.writer.events if isinstance(event, TransferSettled)]
    assert {event.tag for event in settled} == set(tags)
    assert all(event.error is not None for event in settled)
    pair.writer.events.clear()
    with pytest.raises(UnknownPeer):
        pair.transport.submit(peer, CopyPlan.empty(), next(unique))


def test_transfer_of_a_broken_connection_is_quiet_only_if_nothing_can_be_under_way(
    pair: Pair, tls: str
) -> None:
    peer = pair.connect()
    broken, untouched = next(unique), next(unique)
    pair.transport.submit(peer, plan_volume(4 << 30), broken)
    # Batches take turns, so when this one is done the large one has begun.
    assert pair.writer.copy(peer, plan_volume(64 << 10), tag=next(unique)).error is None
    pair.transport.disconnect(peer)
    pair.transport.submit(peer, plan_volume(1 << 20), untouched)
    settled = pair.writer.settle(broken)
    assert settled.error is not None
    assert 0 < settled.nbytes < 4 << 30
    assert settled.is_quiet == (is_mapped(tls))
    assert pair.writer.settle(untouched).is_quiet
    assert pair.writer.last_event(peer) == ConnectionClosed(peer)


@pytest.mark.slow
def test_stopped_peer_can_be_left_and_its_transfers_settle(pair: Pair, doomed: Remote) -> None:
    peer = pair.connect(doomed)
    connecting = f"peer{next(unique)}"
    descriptor = doomed.open_target(connecting)
    os.kill(doomed.pid, signal.SIGSTOP)
    pair.transport.connect(connecting, descriptor)
    tags = {next(unique): name for name in (peer, connecting) for _ in range(3)}
    for tag, name in tags.items():
        pair.transport.submit(name, plan_volume(4 << 30), tag)
    for name in (peer, connecting):
        pair.transport.disconnect(name)
    assert all(pair.writer.settle(tag).error is not None for tag in tags)
    for name in (peer, connecting):
        assert pair.writer.last_event(name) == ConnectionClosed(name)


def thread_state(pid: int) -> str:
    """What the kernel says of a thread of the transport's: S asleep, T stopped, ..."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() in ("baton-ucx", "baton-stream"):
            return (task / "stat").read_text().rpartition(")")[2].split()[0]
    raise AssertionError(f"process {pid} has no progress thread")


def wait_thread_state(pid: int, state: str) -> None:
    end_at = time.monotonic() + STATE_TIMEOUT_S
    while thread_state(pid) != state:
        assert time.monotonic() < end_at, f"progress thread of {pid} is {thread_state(pid)}"


@pytest.mark.slow
def test_target_that_slept_when_it_was_stopped_goes_on(pair: Pair, doomed: Remote) -> None:
    peer = pair.connect(doomed)
    wait_thread_state(doomed.pid, "S")
    os.kill(doomed.pid, signal.SIGSTOP)
    wait_thread_state(doomed.pid, "T")
    os.kill(doomed.pid, signal.SIGCONT)
    assert pair.writer.copy(peer, plan_volume(1 << 20), tag=next(unique)).error is None
    assert isinstance(pair.connect(doomed), str), "its progress thread still takes commands"


@pytest.mark.slow
def test_transfer_cancelled_while_its_peer_never_answers_settles(
    pair: Pair, doomed: Remote
) -> None:
    peer = f"peer{next(unique)}"
    descriptor = doomed.open_target(peer)
    os.kill(doomed.pid, signal.SIGSTOP)
    wait_thread_state(doomed.pid, "T")  # a signal takes a while, in which it would answer
    pair.transport.connect(peer, descriptor)
    tag = next(unique)
    # Over mapped memory a put needs no answer: so much is never done before the cancel comes.
    pair.transport.submit(peer, plan_volume(4 << 30), tag)
    pair.transport.cancel(tag)
    settled = pair.writer.settle(tag)
    assert (settled.error, settled.is_quiet) == (CANCELLED, True)
    assert settled.nbytes < 4 << 30
    assert pair.writer.disconnect(peer) == ConnectionClosed(peer)


@pytest.mark.slow
def test_killed_peer_fails_and_all_its_transfers_settle_first(pair: Pair, doomed: Remote) -> None:
    survivor = pair.connect()
    peer = pair.connect(doomed)
    tags = [next(unique) for _ in range(8)]
    for tag in tags:
        pair.transport.submit(peer, plan_volume(8 << 30), tag)
    doomed.kill()
    assert isinstance(pair.writer.last_event(peer), ConnectionFailed)
    settled = [event for event in pair.writer.events if isinstance(event, TransferSettled)]
    assert {event.tag for event in settled} == set(tags)
    assert all(event.error is not None for event in settled)
    pair.writer.events.clear()
    assert pair.writer.copy(survivor, plan_volume(1 << 20), tag=next(unique)).error is None


@pytest.mark.slow
def test_idle_connection_to_a_killed_peer_fails(pair: Pair, doomed: Remote) -> None:
    peer = pair.connect(doomed)
    doomed.kill()
    assert isinstance(pair.writer.last_event(peer), ConnectionFailed)


@pytest.mark.slow
def test_restarted_peer_connects_again_under_its_name(pair: Pair, tls: str) -> None:
    for _ in range(3):
        remote = start_remote(tls)
        assert isinstance(pair.writer.connect("phoenix", remote.open_target("p")), ConnectionMade)
        assert pair.writer.copy("phoenix", plan_volume(2 << 20), tag=next(unique)).error is None
        assert np.array_equal(remote.read("pool"), pair.sources[0])
        remote.kill()
        assert isinstance(pair.writer.last_event("phoenix"), ConnectionFailed)


@pytest.mark.slow
def test_connecting_to_a_dead_process_fails(pair: Pair, doomed: Remote) -> None:
    descriptor = doomed.open_target("late")
    doomed.kill()
    peer = f"peer{next(unique)}"
    assert isinstance(pair.writer.connect(peer, descriptor), ConnectionFailed)


@pytest.mark.slow
def test_target_survives_a_killed_writer_and_takes_its_successor(pair: Pair, tls: str) -> None:
    for _ in range(2):
        writer = start_remote(tls)
        name = f"peer{next(unique)}"
        event = writer.call("connect", "target", pair.remote.open_target(name))
        assert isinstance(event, ConnectionMade)
        writer.call("submit", "target", plan_volume(8 << 30), 1)
        writer.kill()
        pair.remote.call("close_target", name)
    peer = pair.connect()
    assert pair.writer.copy(peer, plan_volume(2 << 20), tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


# Fences and isolation -----------------------------------------------------------------------------


def test_closed_target_takes_no_late_put(pair: Pair, tls: str) -> None:
    if not is_fenced_by_close([tls.partition("-")[0]]):
        pytest.skip("a shared-memory mapping outlives the target's worker")
    peer = pair.connect()
    tags = [next(unique) for _ in range(4)]
    for tag in tags:
        pair.transport.submit(peer, plan_volume(4 << 30), tag)
    pair.remote.call("close_target", peer)
    pair.fill(0x55)
    assert isinstance(pair.writer.last_event(peer), ConnectionFailed)
    assert all(pair.writer.settle(tag).error is not None for tag in tags)
    successor = pair.connect()
    assert pair.writer.copy(successor, plan_of((1, 0, 1, 0, 8)), tag=next(unique)).error is None
    assert np.all(pair.remote.read("pool") == 0x55)


def test_targets_of_one_process_are_independent(pair: Pair, tls: str) -> None:
    closed, kept = pair.connect(), pair.connect()
    pair.remote.call("close_target", closed)
    if tls not in ("auto", "posix"):  # who writes through mappings alone is told by its scheduler
        assert isinstance(pair.writer.last_event(closed), ConnectionFailed)
    assert pair.writer.copy(kept, plan_volume(2 << 20), tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


def test_only_announced_regions_are_reachable(pair: Pair) -> None:
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["tail"])
    assert [region.name for region in descriptor.regions] == ["tail"]
    assert isinstance(pair.writer.connect(peer, descriptor), ConnectionMade)
    with pytest.raises(PlanOutOfBounds):
        pair.transport.submit(peer, plan_of((0, 0, 1, 0, 8)), next(unique))


@pytest.mark.parametrize("occupation", ["hold_gil", "spin"])
def test_transfer_completes_while_the_targets_python_is_busy(pair: Pair, occupation: str) -> None:
    peer = pair.connect()
    pair.fill(0)
    pair.remote.post(occupation)
    settled = pair.writer.copy(peer, plan_volume(8 << 20), tag=next(unique))
    assert settled.error is None
    assert not pair.remote.has_replied()
    pair.remote.open_gate()
    pair.remote.reply()
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


# What stays ---------------------------------------------------------------------------------------


def shared_memory_of(remote: Remote) -> set[Path]:
    """What a servant's memory lies in. Other processes of the machine may have theirs beside it."""
    maps = Path(f"/proc/{remote.pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in maps if "/dev/shm/" in line}


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory(pair: Pair, doomed: Remote, tls: str) -> None:
    closing = start_remote(tls)
    pair.connect(doomed)
    pair.connect(closing)
    files = shared_memory_of(doomed) | shared_memory_of(closing)
    assert bool(files) == (is_mapped(tls))
    doomed.kill()
    closing.call("close")
    closing.exit()
    assert not any(file.exists() for file in files)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_batches(pair: Pair) -> None:
    peer = pair.connect()
    plan = plan_volume(1 << 20, run_nbytes=4096)

    def resident_nbytes_after(batch_count: int) -> int:
        for _ in range(batch_count):
            assert pair.writer.copy(peer, plan, tag=next(unique)).error is None
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_nbytes_after(200)
    assert resident_nbytes_after(1500) - before < 2 << 20


def test_view_stays_readable_after_close(tls: str) -> None:
    writer = Writer(tls)
    view = writer.transport.allocate("source", GUARD_NBYTES).view
    assert view is not None
    view[:] = 3
    writer.transport.close()
    writer.transport.close()
    assert np.all(view == 3)
