"""Which processes of a peer can be watched from here, and which of them can map memory of ours.

A host id is "<boot id> <process namespace>": equal ids mean that a process id names the same
process on both sides, different boot ids that no process of one maps memory of the other. A server
has one id for each rank, since its ranks may be spread over several machines; "" is an unknown one.
The scheduler runs beside rank 0. Knows nothing of transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerProcesses:
    """The worker processes of a peer, as the scheduler of another server sees them.

    watched_pids: those on its host. has_unwatched: some are not on its host, and could still map
    memory of its server. is_elsewhere: none can map memory of its server.
    """

    watched_pids: tuple[int, ...] = ()
    has_unwatched: bool = True
    is_elsewhere: bool = False


ProcessIds = tuple[tuple[str, int], ...]
"""(host id, process id) of each rank of a peer; () if they are not known."""


def process_ids(host_ids: Sequence[str], pids: Sequence[int]) -> ProcessIds:
    """As they were announced; () if they name no processes."""
    if len(host_ids) != len(pids) or not all(host_ids):
        return ()
    return tuple(zip(host_ids, pids, strict=True))


def peer_processes(
    host_ids: Sequence[str], pids: Sequence[int], our_host_ids: Sequence[str]
) -> PeerProcesses:
    """host_ids, pids: of the peer's ranks, as it announced them. our_host_ids: of our own ranks.

    What was not announced, or not once for each rank, is not known: it counts as unwatched.
    """
    if not our_host_ids or not pids or len(host_ids) != len(pids):
        return PeerProcesses()
    here = our_host_ids[0]
    watched = tuple(pid for host, pid in zip(host_ids, pids, strict=True) if here and host == here)
    elsewhere = {
        host for host in host_ids if all(_is_other_machine(host, our) for our in our_host_ids)
    }
    return PeerProcesses(
        watched_pids=watched,
        has_unwatched=any(not host or host not in {here, *elsewhere} for host in host_ids),
        is_elsewhere=elsewhere.issuperset(host_ids),
    )


def _is_other_machine(one: str, other: str) -> bool:
    return bool(one and other) and one.partition(" ")[0] != other.partition(" ")[0]
