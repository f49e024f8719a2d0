"""A prefill and a decode server of our own, started for a while and gone without a trace after.

Each is a process group of its own and logs to a file. Knows nothing of questions.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
PROGRESS_INTERVAL_S = 2.0


class DemoFailed(Exception):
    """The demo can't go on; the text says why and where to look."""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass(slots=True)
class Server:
    """One running server. url: its HTTP root."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def last_words(self, line_count: int = 8) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])


@dataclass(slots=True)
class Pair:
    """Start with `with Pair(model) as pair:`; both are ready inside and gone after.

    prefill_args, decode_args: further flags of the two servers.
    """

    model_path: Path
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    say: Callable[[str], None] = print
    servers: list[Server] = field(default_factory=list)
    log_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="baton-demo-")))

    @property
    def prefill(self) -> Server:
        return self.servers[0]

    @property
    def decode(self) -> Server:
        return self.servers[1]

    def __enter__(self) -> Pair:
        prefill_port, bootstrap_port, decode_port = free_ports(3)
        try:
            self._start(
                "prefill", prefill_port, "--bootstrap-port", str(bootstrap_port), *self.prefill_args
            )
            self._start(
                "decode", decode_port, "--prefill", f"127.0.0.1:{bootstrap_port}", *self.decode_args
            )
            for server in self.servers:
                self._wait_ready(server)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self, role: str, port: int, *args: str) -> None:
        log_path = self.log_dir / f"{role}.log"
        command = [sys.executable, "-m", f"{role}_server", "--model-path", str(self.model_path)]
        command += ["--port", str(port), *args]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.servers.append(Server(role, f"http://127.0.0.1:{port}", process, log_path))

    def _wait_ready(self, server: Server) -> None:
        started_at = said_at = time.monotonic()
        while True:
            if server.process.poll() is not None:
                raise DemoFailed(
                    f"the {server.name} server ended with exit code {server.process.returncode}:\n"
                    f"{server.last_words()}"
                )
            try:
                if httpx.get(f"{server.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            now = time.monotonic()
            if now - started_at > READY_TIMEOUT_S:
                raise DemoFailed(
                    f"the {server.name} server is not ready after {READY_TIMEOUT_S:.0f} s:\n"
                    f"{server.last_words()}"
                )
            if now - said_at > PROGRESS_INTERVAL_S:
                said_at = now
                self.say(f"  waiting for the {server.name} server ({now - started_at:.0f} s)")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask both to drain, decode first; kill what does not end. Nothing of them is left."""
        for server in reversed(self.servers):
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        for server in reversed(self.servers):
            try:
                server.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
