"""A prefill and a decode server, started for a while and ended with all their files.

Each is a process group of its own and logs to a file. Knows nothing of questions.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
PROGRESS_INTERVAL_S = 2.0


class DemoFailed(Exception):
    """The demo can't go on; the text says why and where to look."""


PORTS = range(10_000, 30_000)
"""Below the ports that Linux gives to clients, which may be taken before a server binds them."""


def end_when_terminated() -> None:
    """SIGTERM ends this process as an error would: what it has started is stopped first."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface without a listener just now."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    return found


@dataclass(slots=True)
class Server:
    """One running server. url: its HTTP root."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def last_words(self, line_count: int = 8) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])


def start_server(
    role: str,
    port: int,
    *args: str,
    model_path: Path,
    log_dir: Path,
    name: str = "",
    prefix: Sequence[str] = (),
) -> Server:
    """Start a server of `role`, "prefill" or "decode"; it is not ready yet.

    name: in messages and of the log file; the role if empty. prefix: a command that runs another
    one in its own place.
    """
    name = name or role
    log_path = log_dir / f"{name}.log"
    command = [*prefix, sys.executable, "-m", f"{role}_server", "--model-path", str(model_path)]
    command += ["--port", str(port), *args]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log_path)


def wait_ready(
    server: Server, say: Callable[[str], None] = print, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Wait until a server can serve. Raises: DemoFailed if it ends or takes too long."""
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
        if now - started_at > timeout_s:
            raise DemoFailed(
                f"the {server.name} server is not ready after {timeout_s:.0f} s:\n"
                f"{server.last_words()}"
            )
        if now - said_at > PROGRESS_INTERVAL_S:
            said_at = now
            say(f"  waiting for the {server.name} server ({now - started_at:.0f} s)")
        time.sleep(0.1)


def stop_servers(servers: Sequence[Server], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Ask servers to drain, the last one first; kill those that do not end. Nothing of them is
    left."""
    for server in reversed(servers):
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
    end_at = time.monotonic() + timeout_s
    for server in reversed(servers):
        try:
            server.process.wait(max(0.0, end_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            server.process.kill()  # its own processes die with it
            server.process.wait()


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
        dial = ("--prefill", f"127.0.0.1:{bootstrap_port}")
        listen = ("--bootstrap-port", str(bootstrap_port))
        try:
            self._start("prefill", prefill_port, *listen, *self.prefill_args)
            self._start("decode", decode_port, *dial, *self.decode_args)
            for server in self.servers:
                wait_ready(server, self.say)
        except BaseException:
            stop_servers(self.servers)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop_servers(self.servers)

    def _start(self, role: str, port: int, *args: str) -> None:
        server = start_server(role, port, *args, model_path=self.model_path, log_dir=self.log_dir)
        self.servers.append(server)
