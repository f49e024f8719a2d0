"""The parent of a server's processes: starts them, stops them, and decides nothing else.

Any child that ends unasked ends the server with a non-zero exit code. A first SIGTERM or SIGINT
drains: the frontend finishes its open requests, then the scheduler and the workers end. A second
one ends everything at once. Children die with the supervisor, whatever kills it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from common.clock import SystemClock
from common.config import ServerConfig, write_config
from common.log import setup_log
from common.runtime.exit_codes import EXIT_CHILD_DIED, EXIT_CONFIG, EXIT_START_AGAIN
from common.runtime.exposure import open_doors

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
# How often children are looked at; a signal wakes the supervisor at once.
WATCH_INTERVAL_S = 0.1
# What a process may take to end after the drain before it is killed.
END_TIMEOUT_S = 5.0
# What the frontend may take to answer its open requests when the server has failed.
LAST_ANSWERS_TIMEOUT_S = 5.0

RUNTIME_DIR = re.compile(r"baton-(?:prefill|decode)-([0-9]+)-[^-]+")

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """The processes of one server on this machine, in the order in which they are stopped."""

    def __init__(self, config: ServerConfig, scheduler_module: str) -> None:
        self._config = config
        self._scheduler_module = scheduler_module
        self._clock = SystemClock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._signal_count = 0

    def run(self) -> int:
        """Start everything and watch it; returns the exit code of the server."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle_signal)
        if self._config.node_rank == 0:
            self._start("frontend", "common.frontend")
            self._start("scheduler", self._scheduler_module)
        for rank in self._config.local_ranks:
            self._start(f"worker-{rank}", "common.worker", "--rank", str(rank))
        code = self._watch()
        self._end_rest()
        return code

    def _start(self, name: str, module: str, *extra: str) -> None:
        command = [sys.executable, "-m", module, "--config", self._config.config_path, *extra]
        # A session of its own: a Ctrl-C at the terminal reaches the supervisor alone, which drains.
        self._children[name] = subprocess.Popen(
            command, start_new_session=True, preexec_fn=_die_with_parent
        )
        log.debug("started %s as process %d", name, self._children[name].pid)

    def _handle_signal(self, signum: int, frame: object) -> None:
        self._signal_count += 1

    def _watch(self) -> int:
        """Until a child ends unasked or a signal asks for the end."""
        while self._signal_count == 0:
            codes = {name: child.poll() for name, child in self._children.items()}
            ended = {name: code for name, code in codes.items() if code is not None}
            if ended:
                return self._explain(ended)
            self._sleep()
        return self._drain()

    def _explain(self, codes: dict[str, int]) -> int:
        """Several children may have ended since the last look, the first one by itself and others
        because of it: all are named, and a setting that one found unusable is the cause."""
        if EXIT_CONFIG in codes.values():
            return EXIT_CONFIG
        if EXIT_START_AGAIN in codes.values():
            return EXIT_START_AGAIN
        if self._config.node_rank > 0 and not any(codes.values()):
            log.info("%s was told to end by the scheduler on node 0", ", ".join(codes))
            return 0
        for name, code in codes.items():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.error("%s ended with %s: the server stops", name, how)
        return EXIT_CHILD_DIED

    def _drain(self) -> int:
        """Frontend first, so that open requests end well; then the scheduler, then its workers."""
        log.info("draining for at most %.0f s", self._config.drain_timeout_s)
        code = 0
        for name, child in self._children.items():
            if child.poll() is None:
                child.terminate()
            if not self._wait(child, self._config.drain_timeout_s + END_TIMEOUT_S):
                log.warning("%s did not end in time and is killed", name)
                code = EXIT_CHILD_DIED
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

        It answers its open requests as soon as the scheduler is gone; while that lives, it hopes.
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


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it when the supervisor is gone."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_up_after_dead() -> None:
    """Remove the runtime directories of this user's servers whose supervisor was killed.

    They are named after its process id; one that was given away again only delays this. Shared
    memory needs no such care: UCX unlinks its segments as soon as they are mapped.
    """
    for path in Path(tempfile.gettempdir()).glob("baton-*-*-*"):
        match = RUNTIME_DIR.fullmatch(path.name)
        if match is None or path.is_symlink() or Path("/proc", match[1]).exists():
            continue
        if path.stat().st_uid == os.getuid():
            log.warning("removing %s of a server that was killed", path)
            shutil.rmtree(path, ignore_errors=True)


def run(config: ServerConfig, scheduler_module: str) -> int:
    """Run a server until it is told to stop; returns its exit code.

    scheduler_module: the role's scheduler process, as `python -m` takes it.
    """
    setup_log(config.role, "supervisor", config.log_level)
    clean_up_after_dead()
    runtime_dir = Path(tempfile.mkdtemp(prefix=f"baton-{config.role}-{os.getpid()}-"))
    try:
        config = msgspec.structs.replace(config, runtime_dir=str(runtime_dir))
        write_config(config)
        for door in open_doors(config):
            log.warning("%s", door)
        return Supervisor(config, scheduler_module).run()
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
