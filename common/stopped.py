"""Which of our own processes are stopped. Knows nothing of why."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, Ctrl-Z). One that a debugger holds is not:
    profilers hold every process they look at, a hundred times a second."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False  # it has ended, which others see
    return stat.rpartition(b") ")[2].startswith(b"T")
