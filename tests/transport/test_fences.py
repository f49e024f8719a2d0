"""What closing a target proves, for every transport and for connections that use several."""

from __future__ import annotations

import pytest

from common.transport.fences import STORED_BY, is_fenced_by_close


@pytest.mark.parametrize(
    "connections",
    [
        ["tcp"],
        ["stream"],
        ["rc_mlx5"],
        ["rc_verbs", "tcp"],
        ["dc_mlx5,tcp"],
        ["cuda_copy,tcp"],
        ["cuda_copy,rc_mlx5,tcp", "rc_mlx5"],
    ],
)
def test_what_passes_a_socket_or_queue_pair_of_the_target_ends_with_it(
    connections: list[str],
) -> None:
    assert is_fenced_by_close(connections)


@pytest.mark.parametrize(
    "connections",
    [["posix"], ["posix,tcp"], ["sysv"], ["cma,tcp"], ["self"], ["cuda_ipc"], ["cuda_ipc,tcp"]],
)
def test_what_the_writer_stores_itself_does_not(connections: list[str]) -> None:
    assert not is_fenced_by_close(connections)


def test_one_connection_that_the_writer_stores_through_is_enough() -> None:
    assert not is_fenced_by_close(["tcp", "rc_mlx5", "posix"])


@pytest.mark.parametrize("connections", [[], [""], ["srd"], ["tcp,srd"], ["cuda_copy"], ["TCP"]])
def test_what_is_not_known_proves_nothing(connections: list[str]) -> None:
    assert not is_fenced_by_close(connections)


def test_every_name_is_spelled_as_transports_are() -> None:
    assert all(name == name.lower().strip() and "," not in name for name in STORED_BY)
