"""What processes of a server are told by their environment: where shared memory is made, how
threads wait for each other, and whether UCX hooks into libc."""

from __future__ import annotations

import os
from pathlib import Path

UCX_SHARED_MEMORY_VARIABLE = "UCX_POSIX_DIR"
UCX_HOOK_VARIABLE = "UCX_MEM_MMAP_HOOK_MODE"
OMP_WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""What says how long a thread of libgomp, that torch computes with, polls for the others."""
OMP_SPIN_COUNT = 2000
"""Some tens of microseconds. By default it is milliseconds, and while other processes want the
cores too, the thread that is waited for gets none: a prompt of 128 tokens on two threads took
2,800 ms beside one busy process, and 270 so. On quiet cores decode passes take a tenth to a third
longer so (more sleeps), which is the smaller harm."""


def shared_memory_dir() -> Path:
    """Where UCX makes shared memory unless it is told otherwise."""
    return Path(os.environ.get(UCX_SHARED_MEMORY_VARIABLE, "/dev/shm"))


def without_ucx_hooks() -> None:
    """To be called before UCX is loaded in a process that has no card, unless the environment names
    hooks. They are into unmapping, to forget what is registered with a card; by default UCX
    rewrites libc's functions for them, 0.4 CPU seconds of every start."""
    os.environ.setdefault(UCX_HOOK_VARIABLE, "none")


def child_environment(shared_memory_dir: str) -> dict[str, str]:
    """Of a server's processes. shared_memory_dir: where UCX is to make shared memory; "": where it
    would."""
    told = {UCX_SHARED_MEMORY_VARIABLE: shared_memory_dir} if shared_memory_dir else {}
    if not any(name in os.environ for name in OMP_WAIT_VARIABLES):
        told[OMP_WAIT_VARIABLES[0]] = str(OMP_SPIN_COUNT)
    return {**os.environ, **told}
