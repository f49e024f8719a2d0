"""Real server processes on ports that stay, and what the kernel and the servers say of them.

Knows nothing of load or of faults. Everything it starts is gone after `stop` or `kill`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
import msgspec

from demo.servers import free_ports
from tests.soak.plans import Side

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
LOOK_INTERVAL_S = 0.1
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


class ServerFailed(Exception):
    """A server did not come up or did not go; the text has its last words."""


class Part(StrEnum):
    """Processes of one server."""

    SUPERVISOR = "supervisor"
    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    WORKER = "worker"


MODULES = {
    Part.FRONTEND: "common.frontend",
    Part.SCHEDULER: "scheduler_process",
    Part.WORKER: "common.worker",
}


class _PageGroup(msgspec.Struct):
    used: int
    quarantined: int
    free: int


class _Internal(msgspec.Struct):
    queues: dict[str, int]
    counters: dict[str, float]


class _Peer(msgspec.Struct):
    state: str


class _PrefixCache(msgspec.Struct):
    token_count: int
    host_token_count: int
    host_token_max: int


class Look(msgspec.Struct):
    """What a server says of itself."""

    page_groups: list[_PageGroup]
    internal_states: list[_Internal]
    is_state_fresh: bool
    peers: list[_Peer]
    prefix_cache: _PrefixCache | None = None

    @property
    def held_count(self) -> int:
        """Pages that are neither free nor a forgettable prefix."""
        return sum(group.used + group.quarantined for group in self.page_groups)

    @property
    def queues(self) -> dict[str, int]:
        return self.internal_states[0].queues

    @property
    def queued_count(self) -> int:
        return sum(self.queues.values())

    @property
    def counters(self) -> dict[str, float]:
        return self.internal_states[0].counters

    @property
    def tier_share(self) -> float:
        """How full the tier in host memory is, 0 to 1."""
        cache = self.prefix_cache
        return (
            cache.host_token_count / cache.host_token_max if cache and cache.host_token_max else 0
        )

    @property
    def is_at_rest(self) -> bool:
        return self.is_state_fresh and self.held_count == 0 and self.queued_count == 0


@dataclass(slots=True)
class Server:
    """One server. role: "prefill" or "decode". args: its flags beyond model, host and port.

    prefix: what its command begins with, such as a program that runs it elsewhere. started_pids: of
    its supervisors, one per start.
    """

    role: str
    port: int
    args: tuple[str, ...]
    log_path: Path
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_pids: set[int] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        assert not self.is_running
        command = [*self.prefix, sys.executable, "-m", f"{self.role}_server"]
        command += ["--model-path", str(CHECKPOINT)]
        command += ["--host", self.host, "--port", str(self.port), *self.args]
        # What a killed supervisor can't remove is to lie with the logs, and to go with them.
        environment = {**os.environ, "TMPDIR": str(self.log_path.parent)}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=environment,
            )
        self.started_pids.add(self.process.pid)

    def pids(self) -> dict[Part, int]:
        """The processes that are there now; a worker of rank 0 stands for all."""
        if self.process is None:
            return {}
        found = {Part.SUPERVISOR: self.process.pid}
        for pid in _children(self.process.pid):
            command = read_or_empty(f"/proc/{pid}/cmdline").replace("\0", " ")
            for part, module in MODULES.items():
                if module in command:
                    found[part] = pid
        return found

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises: ServerFailed if it ends or is not ready in time."""
        end_at = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
            while True:
                if not self.is_running:
                    code = self.process.returncode if self.process else None
                    raise ServerFailed(f"{self.role} ended with {code}:\n{self.last_words()}")
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if time.monotonic() > end_at:
                    raise ServerFailed(
                        f"{self.role} is not ready after {timeout_s:g} s:\n{self.last_words()}"
                    )
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> Look | None:
        """None if the server does not answer now."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
                response = await client.get("/server_info")
        except httpx.TransportError:
            return None
        return msgspec.json.decode(response.content, type=Look)

    async def flush_cache(self) -> str:
        """Have it forget every cached prefix; why it can't, or "" if nothing is left."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as client:
                response = await client.post("/flush_cache")
        except httpx.TransportError as error:
            return type(error).__name__
        return "" if response.status_code == 200 else response.text

    async def stop(self) -> int:
        """Ask it to drain and wait; its exit code. Raises: ServerFailed if it had to be killed."""
        if self.process is None:
            return 0
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
        end_at = time.monotonic() + STOP_TIMEOUT_S
        while self.is_running:
            if time.monotonic() > end_at:
                self.kill()
                raise ServerFailed(f"{self.role} did not end:\n{self.last_words()}")
            await asyncio.sleep(LOOK_INTERVAL_S)
        return self.process.wait()

    def kill(self) -> None:
        """End every process of it at once, frozen ones too."""
        for pid in self.pids().values():
            send_signal(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def last_words(self, line_count: int = 12) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs. prefix: see Server."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


@dataclass(slots=True)
class ServerPair:
    """A prefill and a decode server on ports of their own. common_args: flags of both."""

    common_args: tuple[str, ...]
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    log_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="baton-test-")))
    places: tuple[Place, Place] = (Place(), Place())
    bootstrap_port: int = 0
    servers: list[Server] = field(default_factory=list)

    @property
    def prefill(self) -> Server:
        return self.servers[0]

    @property
    def decode(self) -> Server:
        return self.servers[1]

    def server(self, side: Side) -> Server:
        return self.prefill if side is Side.PREFILL else self.decode

    @property
    def urls(self) -> dict[Side, str]:
        return {side: self.server(side).url for side in Side}

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Where the prefill server is found."""
        return self.places[0].host, self.bootstrap_port

    async def __aenter__(self) -> ServerPair:
        prefill_port, self.bootstrap_port, decode_port = free_ports(3)
        listens = ("--bootstrap-port", str(self.bootstrap_port))
        dials = ("--prefill", f"{self.places[0].host}:{self.bootstrap_port}")
        for role, port, place, args in (
            ("prefill", prefill_port, self.places[0], (*listens, *self.prefill_args)),
            ("decode", decode_port, self.places[1], (*dials, *self.decode_args)),
        ):
            log_path = self.log_dir / f"{role}.log"
            flags = (*args, *self.common_args)
            self.servers.append(Server(role, port, flags, log_path, place.host, place.prefix))
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                await server.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()

    async def stop(self) -> list[int]:
        """Drain both, decode first; their exit codes, decode's first."""
        return [await self.decode.stop(), await self.prefill.stop()]

    async def wait_at_rest(self, timeout_s: float) -> int:
        """Wait until no page is held and nothing is queued; how many pages are held after all."""
        end_at = time.monotonic() + timeout_s
        while True:
            looks = [await server.look() for server in self.servers]
            if all(look is not None and look.is_at_rest for look in looks):
                return 0
            if time.monotonic() > end_at:
                # A server that does not say counts as one that has lost a page.
                return sum(max(1, look.held_count) if look is not None else 1 for look in looks)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def remove_logs(self) -> None:
        """When nothing was off, nobody reads them."""
        shutil.rmtree(self.log_dir)


async def start_lone(common_args: tuple[str, ...], log_path: Path) -> Server:
    """A server that computes prompts itself, ready. The caller stops it."""
    port = free_ports(1)[0]
    server = Server("decode", port, ("--prefill", "none", *common_args), log_path)
    server.start()
    try:
        await server.wait_ready()
    except BaseException:
        server.kill()
        raise
    return server


def send_signal(pid: int, number: signal.Signals) -> None:
    """To one process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds. ready_s: time in which its threads could run and got no core."""

    rss_nbytes: int
    fd_count: int
    thread_count: int
    ready_s: float


def read_use(pid: int) -> ProcessUse | None:
    """None if the process has ended."""
    try:
        resident = int(read_or_empty(f"/proc/{pid}/statm").split()[1]) * PAGE_NBYTES
        fd_count = len(os.listdir(f"/proc/{pid}/fd"))
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, IndexError):
        return None
    waits = [read_or_empty(f"/proc/{pid}/task/{thread}/schedstat").split() for thread in threads]
    ready_s = sum(int(words[1]) for words in waits if len(words) == 3) / 1e9
    return ProcessUse(resident, fd_count, len(threads), ready_s)


def _children(pid: int) -> list[int]:
    text = read_or_empty(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in text.split()]


def read_or_empty(path: str | Path) -> str:
    """What a file says; "" if it is not there."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
