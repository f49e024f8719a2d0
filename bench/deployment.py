"""Servers of the demo model on cores of their own, and a load that is sent to them from one core.

All processes of a server live on its cores. The client lives on one core too, with priority over
the other processes there, so that its times are those of arriving tokens and not of its own
waiting. Knows nothing of the measurements.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench.sending import send_to
from bench.serve.outcome import Run
from bench.serve.workload import Ask
from demo.__main__ import CHECKPOINT
from demo.servers import Server, free_ports, start_server, stop_servers, wait_ready

VOCAB_SIZE = 1280  # of the demo's checkpoint
CONTEXT_LENGTH = 2048
# No prefix cache: every prompt is computed. One thread a worker, because a worker has one core. The
# pool holds all requests of a section.
FLAGS = ("--cpu-threads", "1", "--max-total-tokens", "262144", "--disable-radix-cache")
RUNNING_MAX = 256
CLIENT_PRIORITY = 1  # of SCHED_FIFO, the lowest: before everything that is not of real time


CORES = frozenset({0, 1})  # that shapes name


def missing_cores() -> str:
    """Why no deployment can be measured on this machine, or nothing."""
    missing = sorted(CORES - os.sched_getaffinity(0))
    return f"needs core {' and core '.join(map(str, missing))}" if missing else ""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many servers, and which cores each kind lives on; a single server is a decode server
    that computes prompts itself.

    prefill_count: 0 for single servers.
    """

    name: str
    prefill_count: int
    decode_count: int
    prefill_cores: frozenset[int] = frozenset({0})
    decode_cores: frozenset[int] = frozenset({1})
    client_core: int = 0


@dataclass(slots=True)
class Deployment:
    """Start with `with Deployment(shape) as servers:`; all are ready inside and gone after."""

    shape: Shape
    flags: tuple[str, ...] = ()
    prefills: list[Server] = field(default_factory=list)
    decodes: list[Server] = field(default_factory=list)

    def __enter__(self) -> Deployment:
        shape = self.shape
        log_dir = Path(tempfile.mkdtemp(prefix="baton-bench-"))
        ports = iter(free_ports(2 * shape.prefill_count + shape.decode_count))
        bootstraps: list[str] = []
        try:
            for index in range(shape.prefill_count):
                bootstrap = str(next(ports))
                bootstraps.append(f"127.0.0.1:{bootstrap}")
                server = self._start("prefill", next(ports), index, log_dir, bootstrap)
                self.prefills.append(server)
            for index in range(shape.decode_count):
                dial = ",".join(bootstraps) or "none"
                self.decodes.append(self._start("decode", next(ports), index, log_dir, dial))
            for server in self._all:
                wait_ready(server, lambda _: None)
        except BaseException:
            stop_servers(self._all)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop_servers(self._all)

    @property
    def _all(self) -> list[Server]:
        return [*self.prefills, *self.decodes]

    def _start(self, role: str, port: int, index: int, log_dir: Path, meets: str) -> Server:
        is_prefill = role == "prefill"
        server = start_server(
            role, port, "--bootstrap-port" if is_prefill else "--prefill", meets,
            *FLAGS, *self.flags, model_path=CHECKPOINT, log_dir=log_dir, name=f"{role}-{index}",
        )  # fmt: skip
        # Long before it starts its children, who inherit it.
        cores = self.shape.prefill_cores if is_prefill else self.shape.decode_cores
        os.sched_setaffinity(server.process.pid, cores)
        return server

    def send(self, asks: Sequence[Ask]) -> Run:
        """Send a workload to the decode servers. Raises: as `send_to`."""
        with _client_on(self.shape.client_core):
            return send_to([server.url for server in self.decodes], asks)


@contextmanager
def _client_on(core: int) -> Iterator[None]:
    """This process on one core, before all others there if it may be."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    is_first = True
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(CLIENT_PRIORITY))
    except PermissionError:
        is_first = False  # then its lag says how late it was
    try:
        yield
    finally:
        if is_first:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)
