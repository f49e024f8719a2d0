"""Which processes of a peer prove by their end that nothing of it is written any more."""

from __future__ import annotations

import pytest

from common.protocol.hosts import PeerProcesses, peer_processes

HERE = "boot-a pid:[1]"
OTHER_CONTAINER = "boot-a pid:[2]"
THERE = "boot-b pid:[1]"


@pytest.mark.parametrize(
    ("host_ids", "our_host_ids", "expected"),
    [
        ([HERE, HERE], [HERE], PeerProcesses((7, 8), has_unwatched=False)),
        ([THERE, THERE], [HERE], PeerProcesses((), has_unwatched=False, is_elsewhere=True)),
        # Spread over two machines: what is not here can't map our memory, if all of us is here.
        ([HERE, THERE], [HERE], PeerProcesses((7,), has_unwatched=False)),
        # A rank of ours runs beside a rank of theirs where our scheduler can't watch it.
        ([HERE, THERE], [HERE, THERE], PeerProcesses((7,), has_unwatched=True)),
        ([THERE, THERE], [HERE, THERE], PeerProcesses((), has_unwatched=True)),
        # Another process namespace of this machine: it could map memory, and is not to be watched.
        ([HERE, OTHER_CONTAINER], [HERE], PeerProcesses((7,), has_unwatched=True)),
        ([HERE, ""], [HERE], PeerProcesses((7,), has_unwatched=True)),
        (["", ""], ["", ""], PeerProcesses()),
        ([HERE, HERE], [""], PeerProcesses()),
        ([HERE], [HERE], PeerProcesses()),
        ([HERE, HERE], [], PeerProcesses()),
    ],
)
def test_what_can_be_watched_and_what_could_still_write(
    host_ids: list[str], our_host_ids: list[str], expected: PeerProcesses
) -> None:
    assert peer_processes(host_ids, [7, 8], our_host_ids) == expected


def test_a_peer_that_names_no_processes_is_not_proved_gone() -> None:
    assert peer_processes([], [], [HERE]) == PeerProcesses()
