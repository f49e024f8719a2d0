"""The parent of a server's processes: starts them, stops them, and decides nothing else.

A scheduler that crashes is started again over the same workers, which keep model and pool. So is
one that leaves them to another one, as after an update of their weights, and so are scheduler and
frontend when the frontend asks for another role. Any other child that ends unasked
ends the server with a non-zero exit code. A first SIGTERM or SIGINT drains: the frontend finishes
its open requests, then the scheduler and the workers end. A second signal ends everything at once.
The kernel kills the children of a supervisor that dies.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common.clock import SystemClock
from common.config import (
    Role,
    ServerConfig,
    write_config,
)
from common.environment import child_environment, shared_memory_dir
from common.exit_codes import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FOLLOWED,
    EXIT_START_AGAIN,
    EXIT_SWITCHED,
)
from common.log import setup_log
from common.runtime.exposure import open_doors
from common.runtime.private_dirs import make_private_dir, remove_those_of_the_dead

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
# How often children are looked at; a signal wakes the supervisor at once.
WATCH_INTERVAL_S = 0.1
# Time from the end of the drain until a process that has not ended is killed.
END_TIMEOUT_S = 5.0
# Time for the frontend to answer its open requests when the server has failed.
LAST_ANSWERS_TIMEOUT_S = 5.0
# Crashes of a scheduler within so many seconds that it is started again after. A request that it
# can't stand comes again with the others that were open.
RESTART_COUNT_MAX = 3
RESTART_WINDOW_S = 60.0
NO_ROOM = "no directory for sockets and settings: %s; make room for it, or set TMPDIR"

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """The processes of one server on this machine, in the order in which they are stopped."""

    def __init__(self, config: ServerConfig, environment: dict[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._restarts: deque[float] = deque()
        self._clock = SystemClock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._signal_count = 0

    def run(self) -> int:
        """Start everything and watch it; returns the exit code of the server."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle_signal)
        if self._config.node_rank == 0:
            self._start("frontend", "common.frontend")
            self._start_scheduler()
        for rank in self._config.local_ranks:
            self._start(f"worker-{rank}", "common.worker", "--rank", str(rank))
        code = self._watch()
        self._end_rest()
        return code

    def _start_scheduler(self) -> None:
        """Of the role that this server has now."""
        self._start("scheduler", f"{self._config.role}_server.scheduler_process")

    def _start(self, name: str, module: str, *extra: str) -> None:
        command = [sys.executable, "-m", module, "--config", self._config.config_path, *extra]
        # A session of its own: a Ctrl-C at the terminal reaches the supervisor alone, which drains.
        self._children[name] = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env=self._environment,
        )
        log.debug("started %s as process %d", name, self._children[name].pid)

    def _handle_signal(self, signum: int, frame: object) -> None:
        self._signal_count += 1

    def _watch(self) -> int:
        """Until a child ends that can't be followed by another, or a signal asks for the end."""
        while self._signal_count == 0:
            codes = {name: child.poll() for name, child in self._children.items()}
            ended = {name: code for name, code in codes.items() if code is not None}
            if ended and not self._goes_on(ended):
                return self._explain(ended)
            self._sleep()
        return self._drain()

    def _goes_on(self, ended: dict[str, int]) -> bool:
        """Whether others follow the processes that have ended; then they are started. Workers of
        other machines end with their scheduler."""
        if self._config.nnodes > 1:
            return False
        if ended.keys() == {"frontend"} and ended["frontend"] in EXIT_SWITCHED:
            self._switch(EXIT_SWITCHED[ended["frontend"]])
            return True
        if ended == {"scheduler": EXIT_FOLLOWED}:
            self._start_scheduler()
            return True
        if ended.keys() != {"scheduler"} or not self._may_restart(ended["scheduler"]):
            return False
        log.error(
            "the scheduler ended with %s: another one takes its workers on; see its last lines",
            _described(ended["scheduler"]),
        )
        self._start_scheduler()
        return True

    def _may_restart(self, code: int) -> bool:
        """Whether a scheduler that ended so has crashed, and not too often."""
        now = self._clock.now()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        is_crash = code < 0 or code == EXIT_FAILED
        return is_crash and len(self._restarts) <= RESTART_COUNT_MAX

    def _switch(self, role: Role) -> None:
        """The frontend has ended, and no request is open: scheduler and frontend of a role take
        over. The workers stay."""
        scheduler = self._children["scheduler"]
        scheduler.send_signal(signal.SIGUSR1)
        self._wait(scheduler, END_TIMEOUT_S)
        self._config = msgspec.structs.replace(self._config, role=role, standby=False)
        write_config(self._config)
        setup_log(role, "supervisor", self._config.log_level)
        log.info("this is a %s server from now on", role)
        self._start("frontend", "common.frontend")
        self._start_scheduler()

    def _explain(self, codes: dict[str, int]) -> int:
        """The exit code of a server whose children have ended. All that ended since the last look
        are named in the log. A setting that one child found unusable is the cause."""
        if EXIT_CONFIG in codes.values():
            return EXIT_CONFIG
        if EXIT_START_AGAIN in codes.values():
            return EXIT_START_AGAIN
        if self._config.node_rank > 0 and not any(codes.values()):
            log.info("%s ended: the scheduler on node 0 has stopped this server", ", ".join(codes))
            return 0
        for name, code in codes.items():
            log.error(
                "%s ended with %s: the server stops; see the last lines of %s",
                name,
                _described(code),
                name,
            )
        return EXIT_FAILED

    def _drain(self) -> int:
        """Frontend first, so that open requests end well; then the scheduler, then its workers."""
        drain_s = self._config.drain_timeout_s
        log.info("draining for at most %.0f s; a second signal ends the server at once", drain_s)
        code = 0
        for name, child in self._children.items():
            if child.poll() is None:
                child.terminate()
            relay_s = self._config.relay_timeout_s if name == "frontend" else 0.0
            if not self._wait(child, drain_s + relay_s + END_TIMEOUT_S):
                why = "at a second signal" if self._signal_count > 1 else "after --drain-timeout"
                log.warning("%s has not ended and is killed %s", name, why)
                code = EXIT_FAILED
        return code

    def _wait(self, child: subprocess.Popen[bytes], timeout_s: float) -> bool:
        """Whether the child ended by itself; a second signal cuts the wait short."""
        end_at = self._clock.now() + timeout_s
        while child.poll() is None:
            if self._signal_count > 1 or self._clock.now() > end_at:
                child.kill()
                child.wait()
                return False
            self._sleep()
        return True

    def _end_rest(self) -> None:
        """All but the frontend at once, then the frontend gently.

        The frontend answers its open requests once the scheduler is gone, and waits before that.
        """
        for name, child in self._children.items():
            if name != "frontend" and child.poll() is None:
                child.kill()
        frontend = self._children.get("frontend")
        if frontend is not None and frontend.poll() is None:
            frontend.terminate()
            self._wait(frontend, LAST_ANSWERS_TIMEOUT_S)
        for child in self._children.values():
            child.wait()

    def _sleep(self) -> None:
        signal.sigtimedwait([signal.SIGCHLD], WATCH_INTERVAL_S)


def _described(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it when the supervisor is gone."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(config: ServerConfig) -> int:
    """Run a server until a signal stops it; returns its exit code."""
    setup_log(config.role, "supervisor", config.log_level)
    shared = shared_memory_dir()
    try:
        temporary = Path(tempfile.gettempdir())
        for parent in (temporary, shared):
            remove_those_of_the_dead(parent)
        own = make_private_dir(temporary, config.role)
    except OSError as error:
        log.error(NO_ROOM, error)
        return EXIT_START_AGAIN
    try:
        config = msgspec.structs.replace(config, runtime_dir=str(own.path))
        write_config(config)
    except OSError as error:
        log.error(NO_ROOM, error)
        own.remove()
        return EXIT_START_AGAIN
    try:
        for remark in config.remarks:
            log.info("%s", remark)
        for door in open_doors(config):
            log.warning("%s", door)
        with _own_shared_memory(shared, config) as environment:
            return Supervisor(config, environment).run()
    finally:
        own.remove()


@contextmanager
def _own_shared_memory(parent: Path, config: ServerConfig) -> Iterator[dict[str, str]]:
    """The environment of processes whose shared memory lies in a directory of this server.

    UCX unlinks a segment as soon as it is mapped, but making a large one takes a while: a server
    that is killed meanwhile, for want of memory, leaves it behind.
    """
    try:
        own = make_private_dir(parent, config.role)
    except OSError as error:
        log.warning(
            "no directory in %s for shared memory: %s; if this server is killed, remove its "
            "ucx_shm_* files there by hand",
            parent,
            error,
        )
        yield child_environment("")
        return
    try:
        yield child_environment(str(own.path))
    finally:
        own.remove()
