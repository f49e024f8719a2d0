"""What the exit codes of a server and of its processes mean to a process manager."""

from __future__ import annotations

from common.config import Role
from common.errors import ConfigError, NotNow

# A process found its settings unusable: starting it again is of no use.
EXIT_CONFIG = 2
# A process failed, or the server because one of its processes did.
EXIT_FAILED = 1
# The server could only go on as a new process, and ended itself; or it can't start now, and may
# later: a port is in use, a name does not resolve, memory is short. sysexits.h: EX_TEMPFAIL.
# systemd (Restart=on-failure) and Kubernetes (restartPolicy: Always) start it again.
EXIT_START_AGAIN = 75
# A frontend has let its requests end, and the server is to go on in another role. Its supervisor
# alone sees these.
EXIT_SWITCHED = {81: Role.PREFILL, 82: Role.DECODE}
# A scheduler has left its workers to another one, which its supervisor starts. The supervisor
# alone sees this one, too.
EXIT_FOLLOWED = 83


def switched_code(role: Role) -> int:
    """What a frontend ends with whose server is to go on in a role."""
    return next(code for code, one in EXIT_SWITCHED.items() if one is role)


def exit_code_of(error: ConfigError) -> int:
    """What a process ends with that could not start."""
    return EXIT_START_AGAIN if isinstance(error, NotNow) else EXIT_CONFIG
