"""Fences: proofs that a writer can't reach a target's memory any more, by transport.

Two facts make a proof. `close_target` ends all writes through a socket or a queue pair of the
target. Writes that the writer stores itself end when its transfers settle (see transport.py), or
with its process. For a writer that died without settling, the storing side decides which of the two
is needed. Knows nothing of how a connection is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class StoredBy(StrEnum):
    """Who stores the bytes of a put in the target's memory.

    TARGET: a socket or queue pair of the target's, and nothing after `close_target`.
    WRITER: the writer's CPU or GPU through a mapping of its own, until its process ends.
    NEITHER: it copies within one process; another transport of the connection reaches the target.
    """

    TARGET = "target"
    WRITER = "writer"
    NEITHER = "neither"


STORED_BY = {
    # Only the threads of its connections store for a target, and StreamTargets::close shuts their
    # sockets and returns when each of these threads has ended.
    "stream": StoredBy.TARGET,
    # uct_tcp_ep_handle_put_req copies from a socket of the target's worker; the worker closes it.
    "tcp": StoredBy.TARGET,
    # ucp_worker_destroy closes every interface, and uct_rc_iface_cleanup_qps destroys its queue
    # pairs before that returns: the network card drops later packets for them.
    "rc_verbs": StoredBy.TARGET,
    "rc_mlx5": StoredBy.TARGET,
    # The same for the one DC target of the interface (uct_dc_mlx5_destroy_dct).
    "dc_mlx5": StoredBy.TARGET,
    # The same for the one queue pair (uct_ud_iface_destroy_qp); the target's CPU copies from it.
    "ud_verbs": StoredBy.TARGET,
    "ud_mlx5": StoredBy.TARGET,
    # Plain stores into a segment that stays mapped in the writer.
    "posix": StoredBy.WRITER,
    "sysv": StoredBy.WRITER,
    "xpmem": StoredBy.WRITER,
    # process_vm_writev and its like: the writer's system call names our process and an address.
    "cma": StoredBy.WRITER,
    "knem": StoredBy.WRITER,
    # Copies on a stream of the writer's, into memory of ours that it has opened. A put calls back
    # when the event behind its copy has come (uct_cuda_base_progress_event_queue), closed or not.
    "cuda_ipc": StoredBy.WRITER,
    "rocm_ipc": StoredBy.WRITER,
    "ze_ipc": StoredBy.WRITER,
    # Stores into memory of the same process.
    "self": StoredBy.WRITER,
    # Between a device and the host of one process, before the bytes leave or after they came.
    "cuda_copy": StoredBy.NEITHER,
    "gdr_copy": StoredBy.NEITHER,
    "rocm_copy": StoredBy.NEITHER,
    "ze_copy": StoredBy.NEITHER,
}
"""By the names that `ConnectionMade.transports` has. UCX's were read in its sources of 1.22. A
name that is missing counts as stored by the writer."""


def is_fenced_by_close(connections: Iterable[str]) -> bool:
    """Whether `close_target` alone keeps out a writer that died and settled nothing.

    connections: `ConnectionMade.transports` of each of its connections, such as "cuda_copy,tcp".
    The slowest proof among them is needed. No known connection proves nothing, and neither does one
    without a transport by which bytes reach another process.
    """
    parts = [{STORED_BY.get(name, StoredBy.WRITER) for name in c.split(",")} for c in connections]
    return bool(parts) and all(
        StoredBy.TARGET in part and StoredBy.WRITER not in part for part in parts
    )
