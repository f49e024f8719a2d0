"""Checks of file descriptors and shared memory before UCX is called.

UCX aborts the process without a file descriptor, and writes to shared memory that does not exist.

Knows nothing of UCX's own calls.
"""

from __future__ import annotations

import os
import resource

from common.environment import shared_memory_dir
from common.errors import TransportError

# Of one UCX worker with posix among its transports: measured, 4.2 MiB, and as much again.
WORKER_SHARED_NBYTES = 8 << 20
# Of one UCX worker, or one connection, with all its sockets: measured, 9, and as many again.
FILE_COUNT = 18


def check_shared_memory(what: str, nbytes: int) -> None:
    """Raises: TransportError if `nbytes` more don't fit."""
    directory = shared_memory_dir()
    try:
        status = os.statvfs(directory)
    except OSError as exc:
        raise TransportError(f"{what}: {directory} can't be used: {exc.strerror}") from exc
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise TransportError(
            f"{what}: nbytes={nbytes} must fit in {directory}, which has "
            f"{free} bytes free (in a container, raise its shm size)"
        )


def check_files(what: str) -> None:
    """Raises: TransportError if `FILE_COUNT` more can't be opened."""
    opened: list[int] = []
    try:
        while len(opened) < FILE_COUNT:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise TransportError(
            f"{what}: needs {FILE_COUNT} file descriptors: {exc.strerror}; this process may have "
            f"{limit} (ulimit -n)"
        ) from exc
    finally:
        for fd in opened:
            os.close(fd)
