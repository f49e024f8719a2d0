"""What every transport promises, over real UCX between real processes.

`posix,tcp` carries puts as stores into a shared-memory segment, `tcp` through the loopback device.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transport_servant import Remote, Writer

from common.planner.copy_plan import CopyPlan
from common.transport.transport import (
    CANCELLED,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerInUse,
    PlanOutOfBounds,
    RegionRefused,
    TagInUse,
    TransferSettled,
    UnknownPeer,
    is_fenced_by_close,
)

REGION_NBYTES = 2 << 20
GUARD_NBYTES = 64 << 10
TARGET_REGIONS = ("pool", "tail")
unique = itertools.count(1)


class Pair:
    """The test's own transport writing into a servant's two regions."""

    def __init__(self, tls: str) -> None:
        self.writer = Writer(tls)
        self.transport = self.writer.transport
        self.sources = [
            self.allocate("source", REGION_NBYTES),
            self.allocate("small", GUARD_NBYTES),
        ]
        self.remote = start_remote(tls)

    def allocate(self, name: str, nbytes: int) -> np.ndarray:
        view = self.transport.allocate(name, nbytes).view
        assert view is not None
        view[:] = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
        return view

    def connect(self, remote: Remote | None = None) -> str:
        """A fresh connection to a fresh target; its name on both sides."""
        peer = f"peer{next(unique)}"
        descriptor = (remote or self.remote).open_target(peer, list(TARGET_REGIONS))
        event = self.writer.connect(peer, descriptor)
        assert isinstance(event, PeerConnected), event
        return peer

    def fill(self, value: int) -> None:
        for name in TARGET_REGIONS:
            self.remote.call("fill", name, value)

    def close(self) -> None:
        self.transport.close()
        self.remote.exit()


def start_remote(tls: str) -> Remote:
    remote = Remote(tls)
    remote.call("allocate", "pool", REGION_NBYTES)
    remote.call("allocate", "tail", GUARD_NBYTES)
    return remote


@pytest.fixture(params=["posix,tcp", "tcp"], scope="module")
def tls(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def pair(tls: str) -> Iterator[Pair]:
    pair = Pair(tls)
    yield pair
    pair.close()


@pytest.fixture
def doomed(tls: str) -> Iterator[Remote]:
    """A servant that the test may kill."""
    remote = start_remote(tls)
    yield remote
    remote.exit()


def plan_of(*runs: tuple[int, int, int, int, int]) -> CopyPlan:
    """Runs of (source region, source offset, target region, target offset, nbytes)."""
    columns = np.array(runs, dtype=np.int64).reshape(-1, 5).T
    return CopyPlan(*(np.ascontiguousarray(column) for column in columns))


def plan_random(seed: int) -> CopyPlan:
    """Runs of every size and alignment, disjoint at the target, sources overlapping at will."""
    rng = np.random.default_rng(seed)
    runs: list[tuple[int, int, int, int, int]] = []
    for target, target_nbytes in enumerate((REGION_NBYTES, GUARD_NBYTES)):
        offset = int(rng.integers(0, 100))
        while True:
            nbytes = int(rng.choice([0, 1, 7, 64, 511, 4096, 4097, 20_000, 33_333]))
            if offset + nbytes > target_nbytes:
                break
            source = int(rng.integers(0, 2))
            source_nbytes = (REGION_NBYTES, GUARD_NBYTES)[source]
            runs.append(
                (source, int(rng.integers(0, source_nbytes - nbytes + 1)), target, offset, nbytes)
            )
            offset += nbytes + int(rng.choice([0, 1, 3, 100, 5000]))
    order = rng.permutation(len(runs))
    return plan_of(*(runs[index] for index in order))


def plan_volume(nbytes: int, run_nbytes: int = 32 << 10) -> CopyPlan:
    """Much traffic: the whole source onto the whole pool, again and again."""
    slots = np.arange(nbytes // run_nbytes, dtype=np.int64) % (REGION_NBYTES // run_nbytes)
    zeros = np.zeros(len(slots), dtype=np.int64)
    sizes = np.full(len(slots), run_nbytes, dtype=np.int64)
    return CopyPlan(zeros, slots * run_nbytes, zeros, slots * run_nbytes, sizes)


def apply_plan(plan: CopyPlan, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    """The slow oracle."""
    rows = zip(
        plan.source_region.tolist(),
        plan.source_offset.tolist(),
        plan.target_region.tolist(),
        plan.target_offset.tolist(),
        plan.nbytes.tolist(),
        strict=True,
    )
    for source, source_offset, target, target_offset, nbytes in rows:
        run = sources[source][source_offset : source_offset + nbytes]
        targets[target][target_offset : target_offset + nbytes] = run


# What lands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_plan_lands_byte_exact_and_nothing_else_changes(pair: Pair, seed: int) -> None:
    peer = pair.connect()
    plan = plan_random(seed)
    pair.fill(0xEE)
    expected = [np.full(REGION_NBYTES, 0xEE, np.uint8), np.full(GUARD_NBYTES, 0xEE, np.uint8)]
    apply_plan(plan, pair.sources, expected)

    settled = pair.writer.copy(peer, plan, tag=next(unique))

    assert settled.error is None
    assert settled.is_quiet
    assert settled.nbytes == plan.total_nbytes
    for name, content in zip(TARGET_REGIONS, expected, strict=True):
        assert np.array_equal(pair.remote.read(name), content)


def test_settled_means_visible_at_the_target(pair: Pair) -> None:
    peer = pair.connect()
    for value in range(1, 40):
        pair.sources[1][:] = value
        settled = pair.writer.copy(peer, plan_of((1, 0, 1, 0, GUARD_NBYTES)), tag=next(unique))
        assert settled.error is None
        assert np.all(pair.remote.read("tail") == value)


def test_memory_of_the_caller_is_a_target_like_any_other(pair: Pair) -> None:
    name = f"registered{next(unique)}"
    pair.remote.call("register", name, GUARD_NBYTES)
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, [name])
    assert isinstance(pair.writer.connect(peer, descriptor), PeerConnected)
    pair.sources[1][:] = 0x5A
    settled = pair.writer.copy(peer, plan_of((1, 10, 0, 20, 30_000)), tag=next(unique))
    assert settled.error is None
    content = pair.remote.read(name)
    assert np.all(content[20:30_020] == 0x5A)
    assert not content[:20].any()
    assert not content[30_020:].any()


def test_plan_without_runs_settles(pair: Pair) -> None:
    peer = pair.connect()
    settled = pair.writer.copy(peer, CopyPlan.empty(), tag=next(unique))
    assert (settled.error, settled.nbytes, settled.run_count) == (None, 0, 0)


def test_connecting_changes_no_region_of_the_target(pair: Pair) -> None:
    pair.fill(0x3C)
    pair.connect()
    for name in TARGET_REGIONS:
        assert np.all(pair.remote.read(name) == 0x3C)


@pytest.mark.slow
def test_several_peers_with_several_batches_each_all_settle(pair: Pair, doomed: Remote) -> None:
    peers = [pair.connect(), pair.connect(doomed), pair.connect(doomed)]
    plan = plan_volume(8 << 20)
    tags = {next(unique): peer for peer in peers for _ in range(6)}
    for tag, peer in tags.items():
        pair.transport.submit(peer, plan, tag)
    for tag, peer in tags.items():
        settled = pair.writer.settle(tag)
        assert (settled.peer, settled.error, settled.nbytes) == (peer, None, plan.total_nbytes)
    for remote in (pair.remote, doomed):
        assert np.array_equal(remote.read("pool"), pair.sources[0])


def test_transfer_may_be_submitted_before_its_peer_is_connected(pair: Pair) -> None:
    peer = f"peer{next(unique)}"
    pair.transport.connect(peer, pair.remote.open_target(peer))
    assert pair.writer.copy(peer, plan_volume(1 << 20), tag=next(unique)).error is None


@pytest.mark.slow
def test_batch_far_larger_than_the_window_settles(pair: Pair) -> None:
    peer = pair.connect()
    plan = plan_volume(16 << 20, run_nbytes=512)
    assert plan.run_count == 32_768
    assert pair.writer.copy(peer, plan, tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        (0, 0, 0, REGION_NBYTES - 10, 11),
        (0, REGION_NBYTES - 10, 0, 0, 11),
        (0, 0, 1, 0, GUARD_NBYTES + 1),
        (1, 0, 0, 0, GUARD_NBYTES + 1),
        (0, -1, 0, 0, 8),
        (0, 0, 0, -1, 8),
        (0, 0, 0, 0, -8),
        (2, 0, 0, 0, 8),
        (-1, 0, 0, 0, 8),
        (0, 0, 2, 0, 8),
        (0, 0, -1, 0, 8),
        (0, 2**63 - 4, 0, 0, 8),
        (0, 0, 0, 2**63 - 4, 2**63 - 1),
    ],
)
def test_out_of_bounds_run_refuses_the_whole_plan(
    pair: Pair, run: tuple[int, int, int, int, int]
) -> None:
    peer = pair.connect()
    pair.fill(0x11)
    with pytest.raises(PlanOutOfBounds):
        pair.transport.submit(peer, plan_of((0, 0, 0, 0, 4096), run), next(unique))
    assert pair.writer.copy(peer, CopyPlan.empty(), tag=next(unique)).error is None
    for name in TARGET_REGIONS:
        assert np.all(pair.remote.read(name) == 0x11)


def test_arrays_of_different_lengths_are_refused(pair: Pair) -> None:
    peer = pair.connect()
    zeros = np.zeros(2, dtype=np.int64)
    with pytest.raises(PlanOutOfBounds):
        pair.transport.submit(peer, CopyPlan(zeros, zeros, zeros[:1], zeros, zeros), next(unique))


def test_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(UnknownPeer):
        pair.transport.submit("nobody", CopyPlan.empty(), next(unique))
    with pytest.raises(UnknownPeer):
        pair.transport.disconnect("nobody")
    with pytest.raises(UnknownPeer):
        pair.transport.close_target("nobody")


def test_tag_of_an_open_transfer_is_refused_and_free_once_it_settled(pair: Pair) -> None:
    peer = pair.connect()
    tag = next(unique)
    pair.transport.submit(peer, plan_volume(16 << 20), tag)
    with pytest.raises(TagInUse):
        pair.transport.submit(peer, CopyPlan.empty(), tag)
    assert pair.writer.settle(tag).error is None
    assert pair.writer.copy(peer, CopyPlan.empty(), tag).error is None


def test_name_of_an_open_peer_is_refused_and_free_once_it_closed(pair: Pair) -> None:
    peer = pair.connect()
    descriptor = pair.remote.open_target(f"peer{next(unique)}")
    with pytest.raises(PeerInUse):
        pair.transport.connect(peer, descriptor)
    assert pair.writer.disconnect(peer) == PeerClosed(peer)
    assert isinstance(pair.writer.connect(peer, descriptor), PeerConnected)


def test_region_larger_than_shared_memory_is_refused(pair: Pair, tls: str) -> None:
    if "posix" not in tls:
        pytest.skip("tcp needs no shared memory")
    with pytest.raises(RegionRefused, match="/dev/shm"):
        pair.transport.allocate("huge", 1 << 50)


def test_target_that_claims_more_memory_than_it_shares_fails(pair: Pair, tls: str) -> None:
    if "posix" not in tls:
        pytest.skip("only a mapping can be checked before the first put")
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["pool"])
    liar = replace(descriptor.regions[0], nbytes=1 << 40)
    event = pair.writer.connect(peer, replace(descriptor, regions=(liar,)))
    assert isinstance(event, PeerFailed)
    assert "shares less" in event.reason


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
    assert pair.writer.last_event(peer) == PeerClosed(peer)
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
    assert settled.is_quiet == ("posix" in tls)
    assert pair.writer.settle(untouched).is_quiet
    assert pair.writer.last_event(peer) == PeerClosed(peer)


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
        assert pair.writer.last_event(name) == PeerClosed(name)


@pytest.mark.slow
def test_transfer_cancelled_while_its_peer_never_answers_settles(
    pair: Pair, doomed: Remote
) -> None:
    peer = f"peer{next(unique)}"
    descriptor = doomed.open_target(peer)
    os.kill(doomed.pid, signal.SIGSTOP)
    pair.transport.connect(peer, descriptor)
    tag = next(unique)
    pair.transport.submit(peer, plan_volume(1 << 20), tag)
    pair.transport.cancel(tag)
    settled = pair.writer.settle(tag)
    assert (settled.error, settled.is_quiet, settled.nbytes) == (CANCELLED, True, 0)
    assert pair.writer.disconnect(peer) == PeerClosed(peer)


@pytest.mark.slow
def test_killed_peer_fails_and_all_its_transfers_settle_first(pair: Pair, doomed: Remote) -> None:
    survivor = pair.connect()
    peer = pair.connect(doomed)
    tags = [next(unique) for _ in range(8)]
    for tag in tags:
        pair.transport.submit(peer, plan_volume(8 << 30), tag)
    doomed.kill()
    assert isinstance(pair.writer.last_event(peer), PeerFailed)
    settled = [event for event in pair.writer.events if isinstance(event, TransferSettled)]
    assert {event.tag for event in settled} == set(tags)
    assert all(event.error is not None for event in settled)
    pair.writer.events.clear()
    assert pair.writer.copy(survivor, plan_volume(1 << 20), tag=next(unique)).error is None


@pytest.mark.slow
def test_idle_connection_to_a_killed_peer_fails(pair: Pair, doomed: Remote) -> None:
    peer = pair.connect(doomed)
    doomed.kill()
    assert isinstance(pair.writer.last_event(peer), PeerFailed)


@pytest.mark.slow
def test_restarted_peer_connects_again_under_its_name(pair: Pair, tls: str) -> None:
    for _ in range(3):
        remote = start_remote(tls)
        assert isinstance(pair.writer.connect("phoenix", remote.open_target("p")), PeerConnected)
        assert pair.writer.copy("phoenix", plan_volume(2 << 20), tag=next(unique)).error is None
        assert np.array_equal(remote.read("pool"), pair.sources[0])
        remote.kill()
        assert isinstance(pair.writer.last_event("phoenix"), PeerFailed)


@pytest.mark.slow
def test_connecting_to_a_dead_process_fails(pair: Pair, doomed: Remote) -> None:
    descriptor = doomed.open_target("late")
    doomed.kill()
    peer = f"peer{next(unique)}"
    assert isinstance(pair.writer.connect(peer, descriptor), PeerFailed)


@pytest.mark.slow
def test_target_survives_a_killed_writer_and_takes_its_successor(pair: Pair, tls: str) -> None:
    for _ in range(2):
        writer = start_remote(tls)
        name = f"peer{next(unique)}"
        event = writer.call("connect", "target", pair.remote.open_target(name))
        assert isinstance(event, PeerConnected)
        writer.call("submit", "target", plan_volume(8 << 30), 1)
        writer.kill()
        pair.remote.call("close_target", name)
    peer = pair.connect()
    assert pair.writer.copy(peer, plan_volume(2 << 20), tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


# Fences and isolation -----------------------------------------------------------------------------


def test_closed_target_takes_no_late_put_over_tcp(pair: Pair, tls: str) -> None:
    if not is_fenced_by_close(tls):
        pytest.skip("a shared-memory mapping outlives the target's worker")
    peer = pair.connect()
    tags = [next(unique) for _ in range(4)]
    for tag in tags:
        pair.transport.submit(peer, plan_volume(4 << 30), tag)
    pair.remote.call("close_target", peer)
    pair.fill(0x55)
    assert isinstance(pair.writer.last_event(peer), PeerFailed)
    assert all(pair.writer.settle(tag).error is not None for tag in tags)
    successor = pair.connect()
    assert pair.writer.copy(successor, plan_of((1, 0, 1, 0, 8)), tag=next(unique)).error is None
    assert np.all(pair.remote.read("pool") == 0x55)


def test_targets_of_one_process_are_independent(pair: Pair) -> None:
    closed, kept = pair.connect(), pair.connect()
    pair.remote.call("close_target", closed)
    assert isinstance(pair.writer.last_event(closed), PeerFailed)
    assert pair.writer.copy(kept, plan_volume(2 << 20), tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


def test_only_announced_regions_are_reachable(pair: Pair) -> None:
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["tail"])
    assert [region.name for region in descriptor.regions] == ["tail"]
    assert isinstance(pair.writer.connect(peer, descriptor), PeerConnected)
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


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory(pair: Pair, doomed: Remote, tls: str) -> None:
    before = shared_memory_files()
    pair.connect(doomed)
    doomed.kill()
    closing = start_remote(tls)
    pair.connect(closing)
    closing.call("close")
    closing.exit()
    assert shared_memory_files() - before == set()


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
