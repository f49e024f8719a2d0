"""What every transport promises about the bytes it moves and the calls it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.planner.copy_plan import CopyPlan
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    PeerInUse,
    PlanOutOfBounds,
    RegionRefused,
    TagInUse,
    TransferSettled,
    UnknownPeer,
)
from tests.transport.transport_pair import (
    GUARD_NBYTES,
    REGION_NBYTES,
    TARGET_REGIONS,
    Pair,
    apply_plan,
    is_mapped,
    plan_of,
    plan_random,
    plan_volume,
    unique,
)
from tests.transport.transport_servant import Remote

# Of a key, what says which memory it is of; UCX's own key follows.
EXTENT_NBYTES = 24

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


def test_memory_of_the_caller_is_a_target_like_any_other(pair: Pair, tls: str) -> None:
    if tls == "posix":
        pytest.skip("nothing but shared memory can be written")
    name = f"registered{next(unique)}"
    pair.remote.call("register", name, GUARD_NBYTES)
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, [name])
    assert isinstance(pair.writer.connect(peer, descriptor), ConnectionMade)
    pair.sources[1][:] = 0x5A
    settled = pair.writer.copy(peer, plan_of((1, 10, 0, 20, 30_000)), tag=next(unique))
    assert settled.error is None
    content = pair.remote.read(name)
    assert np.all(content[20:30_020] == 0x5A)
    assert not content[:20].any()
    assert not content[30_020:].any()


def test_a_transfer_into_shared_and_into_private_memory_lands_whole(pair: Pair, tls: str) -> None:
    """Over shared memory some of its runs are copies and some are puts."""
    if tls == "posix":
        pytest.skip("nothing but shared memory can be written")
    name = f"registered{next(unique)}"
    pair.remote.call("register", name, GUARD_NBYTES)
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["tail", name])
    assert isinstance(pair.writer.connect(peer, descriptor), ConnectionMade)
    pair.fill(0)
    for value in range(1, 20):
        pair.sources[1][:] = value
        runs = [(1, start, start // 4096 % 2, start, 4096) for start in range(0, 65_536, 4096)]
        settled = pair.writer.copy(peer, plan_of(*runs), tag=next(unique))
        assert (settled.error, settled.nbytes) == (None, 65_536)
        landed = np.stack([pair.remote.read("tail"), pair.remote.read(name)]).reshape(2, -1, 4096)
        assert np.all(landed[0, ::2] == value) and np.all(landed[1, 1::2] == value)


def test_a_run_that_leaves_in_parts_lands_whole(pair: Pair) -> None:
    peer = pair.connect()
    pair.fill(0xEE)
    nbytes = REGION_NBYTES - 33  # no multiple of a part
    settled = pair.writer.copy(peer, plan_of((0, 11, 0, 20, nbytes)), tag=next(unique))
    assert (settled.error, settled.nbytes, settled.run_count) == (None, nbytes, 1)
    content = pair.remote.read("pool")
    assert np.array_equal(content[20 : 20 + nbytes], pair.sources[0][11 : 11 + nbytes])
    assert np.all(content[:20] == 0xEE) and np.all(content[20 + nbytes :] == 0xEE)


def test_memory_that_cant_be_mapped_is_refused_where_all_is_mapped(pair: Pair, tls: str) -> None:
    if tls != "posix":
        pytest.skip("other transports reach it")
    name = f"registered{next(unique)}"
    pair.remote.call("register", name, GUARD_NBYTES)
    reason = pair.remote.failure_of("open_target", "late", [name])
    assert reason.startswith("RegionRefused") and "only memory that was allocated here" in reason


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
    pair.transport.connect(peer, pair.remote.open_target(peer, list(TARGET_REGIONS)))
    assert pair.writer.copy(peer, plan_volume(1 << 20), tag=next(unique)).error is None


@pytest.mark.slow
def test_batch_far_larger_than_the_window_settles(pair: Pair) -> None:
    peer = pair.connect()
    plan = plan_volume(16 << 20, run_nbytes=512)
    assert plan.run_count == 32_768
    assert pair.writer.copy(peer, plan, tag=next(unique)).error is None
    assert np.array_equal(pair.remote.read("pool"), pair.sources[0])


def test_two_processes_may_write_into_each_other_at_once(pair: Pair) -> None:
    peer, mirror = pair.connect(), f"peer{next(unique)}"
    descriptor = pair.transport.open_target(mirror, ["source", "small"])
    assert isinstance(pair.remote.call("connect", mirror, descriptor), ConnectionMade)
    pair.fill(0x42)
    there, back = next(unique), next(unique)
    pair.remote.call("submit", mirror, plan_volume(16 << 20), back)
    pair.transport.submit(peer, plan_of((1, 0, 1, 0, GUARD_NBYTES)), there)
    assert pair.writer.settle(there).error is None
    settled = pair.remote.call("settle", back)
    assert isinstance(settled, TransferSettled)
    assert settled.error is None
    assert np.all(pair.sources[0] == 0x42)
    assert np.array_equal(pair.remote.read("tail"), pair.sources[1])
    pair.transport.close_target(mirror)


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
    descriptor = pair.remote.open_target(f"peer{next(unique)}", list(TARGET_REGIONS))
    with pytest.raises(PeerInUse):
        pair.transport.connect(peer, descriptor)
    assert pair.writer.disconnect(peer) == ConnectionClosed(peer)
    assert isinstance(pair.writer.connect(peer, descriptor), ConnectionMade)


def test_region_larger_than_shared_memory_is_refused(pair: Pair, tls: str) -> None:
    if not is_mapped(tls):
        pytest.skip("needs no shared memory")
    with pytest.raises(RegionRefused, match="/dev/shm"):
        pair.transport.allocate("huge", 1 << 50)


def test_target_that_claims_more_memory_than_it_shares_fails(pair: Pair, tls: str) -> None:
    if not is_mapped(tls):
        pytest.skip("only a mapping can be checked before the first put")
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["pool"])
    liar = replace(descriptor.regions[0], nbytes=1 << 40)
    event = pair.writer.connect(peer, replace(descriptor, regions=(liar,)))
    assert isinstance(event, ConnectionFailed)
    assert "shares less" in event.reason


def test_memory_of_another_process_than_the_peer_said_is_not_written_to(
    pair: Pair, doomed: Remote, tls: str
) -> None:
    """A key names a process and a file of it by numbers, which another one may have meanwhile."""
    if not is_mapped(tls):
        pytest.skip("only a mapping can be checked before the first put")
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["pool"])
    meant = descriptor.regions[0]
    found = doomed.open_target(peer, ["pool"]).regions[0]
    taken = replace(found, key=meant.key[:EXTENT_NBYTES] + found.key[EXTENT_NBYTES:])
    event = pair.writer.connect(peer, replace(descriptor, regions=(taken,)))
    assert isinstance(event, ConnectionFailed)
    assert "shares other memory" in event.reason


@pytest.mark.parametrize("nbytes", [0, 1, EXTENT_NBYTES])
def test_a_key_that_is_too_short_is_refused(pair: Pair, nbytes: int, tls: str) -> None:
    if tls.startswith("stream"):
        pytest.skip("a region of a stream has no key")
    peer = f"peer{next(unique)}"
    descriptor = pair.remote.open_target(peer, ["pool"])
    short = replace(descriptor.regions[0], key=bytes(nbytes))
    event = pair.writer.connect(peer, replace(descriptor, regions=(short,)))
    assert isinstance(event, ConnectionFailed)
    assert "too short" in event.reason
