"""Private directories of one server. They outlive the server only if it is killed.

The next server that starts removes directories of dead servers. The supervisor holds a lock on its
directory while it lives. A process id would not do: containers that share a file system have
different ones. Knows nothing of contents.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

NAME = re.compile(r"baton-(?:prefill|decode)-[0-9]+-[^-]+")
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class PrivateDir:
    """lock_fd: held until the process ends, however it does."""

    path: Path
    lock_fd: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)


def make_private_dir(parent: Path, role: str) -> PrivateDir:
    """A new directory of mode 0700. Raises: OSError, and then nothing is left."""
    path = Path(tempfile.mkdtemp(prefix=f"baton-{role}-{os.getpid()}-", dir=parent))
    # Renamed once it is locked, so that no other server finds an unlocked lock.
    fresh = path / f"{LOCK}.new"
    try:
        lock_fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(path / LOCK)
    except OSError:
        shutil.rmtree(path)
        raise
    return PrivateDir(path, lock_fd)


def remove_those_of_the_dead(parent: Path) -> None:
    """Directories of this user whose supervisor does not hold their lock any more."""
    for path in parent.glob("baton-*-*-*"):
        if not NAME.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            is_ours = path.stat().st_uid == os.getuid()
            if is_ours and _is_abandoned(path / LOCK):
                log.info("removing %s of a server that was killed", path)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # another server that starts removes it just now


def _is_abandoned(lock: Path) -> bool:
    """Raises: OSError if it is not there, which is so while its directory is being made."""
    lock_fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock_fd)
    return True
