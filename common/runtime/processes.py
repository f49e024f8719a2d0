"""Reports the end of processes of this host, seen through pidfds: proof that they write no more.

Knows nothing of what follows from it.
"""

from __future__ import annotations

import os


class ProcessWatch:
    """Groups of processes, each known by a key; a group is gone when its last process has ended."""

    def __init__(self) -> None:
        self._groups: dict[str, set[int]] = {}
        self._gone_at_once: list[str] = []

    def watch(self, key: str, pids: tuple[int, ...]) -> list[int]:
        """Start watching a group; the file descriptors to poll. A group is watched once."""
        if key in self._groups:
            return []
        fds: set[int] = set()
        for pid in pids:
            try:
                fds.add(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
            except OSError:
                # Not ours to watch (another pid namespace, no file descriptors left): the group is
                # then never reported gone, which keeps its pages in quarantine and is safe.
                self.close(sorted(fds))
                return []
        self._groups[key] = fds
        if not fds:
            self._gone_at_once.append(key)
        return sorted(fds)

    def take_gone(self, readable: list[int]) -> tuple[list[str], list[int]]:
        """(keys of groups that are gone now, file descriptors that need no polling any more)."""
        gone, self._gone_at_once = self._gone_at_once, []
        finished: list[int] = []
        for key, fds in list(self._groups.items()):
            ended = fds.intersection(readable)
            fds -= ended
            finished += sorted(ended)
            if not fds:
                del self._groups[key]
                if key not in gone:
                    gone.append(key)
        return gone, finished

    @staticmethod
    def close(fds: list[int]) -> None:
        """Close file descriptors that are no longer polled."""
        for fd in fds:
            os.close(fd)
