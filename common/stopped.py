"""Which of our own processes are stopped. Knows nothing of why."""

from __future__ import annotations

import os

STAT_NBYTES_MAX = 4096  # one line of fifty numbers


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, Ctrl-Z). One that a debugger holds is not:
    profilers hold every process they look at, a hundred times a second."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return False  # it has ended, which others see
    try:
        stat = os.read(file, STAT_NBYTES_MAX)
    except OSError:
        return False
    finally:
        os.close(file)
    return stat.rpartition(b") ")[2].startswith(b"T")
