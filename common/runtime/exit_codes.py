"""What the exit codes of a server and of its processes mean to whoever starts them."""

from __future__ import annotations

# A process found its settings unusable: starting it again is of no use.
EXIT_CONFIG = 2
EXIT_CHILD_DIED = 1
# The server could only go on as a new process, and ended itself; or it found no room for its
# sockets, and may find some later. sysexits.h calls it EX_TEMPFAIL.
# systemd (Restart=on-failure) and Kubernetes (restartPolicy: Always) start it again.
EXIT_START_AGAIN = 75
