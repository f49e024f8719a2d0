"""Settings of glibc's malloc: keep freed memory of a forward pass for the next one.

By default glibc returns large freed blocks to the kernel, and the next pass takes a page fault for
every 4 KiB of them: a third of the time of a CPU's prefill (2,048
tokens of a small model: 77 ms, 49 with these settings, 14,000 faults and none).
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""

KEPT_BLOCK_NBYTES = 256 << 20
"""Larger blocks are mapped and unmapped as before: what is computed over them takes longer."""
KEPT_NBYTES = 1 << 30
"""Free memory at the end of the heap that is kept."""


def keep_freed_memory() -> bool:
    """For the life of this process. False where malloc is not glibc's; nothing has changed then."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, KEPT_BLOCK_NBYTES), (M_TRIM_THRESHOLD, KEPT_NBYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
