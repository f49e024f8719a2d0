"""Other ways to move the same bytes: ucx_perftest, NIXL and Mooncake, each in its own processes.

What NIXL prepares before a transfer is not counted. It is measured as it comes, with a progress
thread at either end, and as it was fastest here, with one at the target only. Mooncake has no
shared memory for pools that it does not own: on one host it goes over tcp, unlike the others.
A contender is stopped while it is not sampled, so that none pays for the threads of another.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import numpy as np

from common.planner.copy_plan import CopyPlan

PATIENCE_S = 180.0  # a machine that others use as well can be slow
PERFTEST_NBYTES = 128 << 20

# Of one end, over "shm" or "tcp", with a pool of so many bytes.
Serve = Callable[[str, int, Connection], None]


class ContenderFailed(Exception):
    """It can't be loaded, ended, or does not answer."""


class Contender:
    """Two stopped processes, woken for each sample. Raises: ContenderFailed, wherever it asks."""

    def __init__(self, serve_target: Serve, serve_writer: Serve, link: str, nbytes: int) -> None:
        self._target, self._target_pipe = start_process(serve_target, link, nbytes)
        self._writer, self._pipe = start_process(serve_writer, link, nbytes)
        try:
            self._ask_writer(receive(self._target_pipe, self._target))
        except ContenderFailed:
            self.close()
            raise
        self._pause()

    def _ask_writer(self, message: object) -> object:
        with suppress(BrokenPipeError):  # it has ended: what is received says how
            self._pipe.send(message)
        return receive(self._pipe, self._writer)

    def _pause(self) -> None:
        for process in (self._writer, self._target):
            os.kill(process.pid or 0, signal.SIGSTOP)

    def _resume(self) -> None:
        for process in (self._writer, self._target):
            os.kill(process.pid or 0, signal.SIGCONT)

    def sample(self, plan: CopyPlan) -> float:
        """GB/s of one transfer."""
        self._resume()
        seconds = self._ask_writer(plan)
        assert isinstance(seconds, float), seconds
        self._pause()
        return plan.total_nbytes / seconds / 1e9

    def close(self) -> None:
        for process in (self._writer, self._target):
            process.kill()
            process.join()


def start_process(
    serve: Serve, link: str, nbytes: int
) -> tuple[multiprocessing.context.SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(link, nbytes, there), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    return process, here


def receive(pipe: Connection, process: multiprocessing.context.SpawnProcess) -> object:
    if not pipe.poll(PATIENCE_S):
        raise ContenderFailed(f"it was silent for {PATIENCE_S:.0f} s")
    try:
        message: object = pipe.recv()
    except (EOFError, OSError) as exc:
        process.join(PATIENCE_S)
        raise ContenderFailed(f"its process ended with code {process.exitcode}") from exc
    return message


# ucx_perftest -------------------------------------------------------------------------------------


def perftest_gbps(library_directory: str, message_nbytes: int) -> float:
    """ucp_put_bw between two processes over tcp, the best UCX does at this message size."""
    program = str(Path(library_directory).parent / "bin" / "ucx_perftest")
    environment = {"LD_LIBRARY_PATH": library_directory, "UCX_TLS": "tcp"}
    server, port = start_perftest_server(program, environment)
    test = f"127.0.0.1 -p {port} -t ucp_put_bw -s {message_nbytes} -w 100 -f"
    client = subprocess.run(
        [program, *test.split(), "-n", str(PERFTEST_NBYTES // message_nbytes)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    server.wait(PATIENCE_S)
    # The last line: iterations, three overheads, average and overall MB/s (2^20), two rates.
    return float(client.stdout.split()[-3]) * (1 << 20) / 1e9


def start_perftest_server(
    program: str, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """A listening server. A port that was free may be taken a moment later: try on."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        command = [program, "-p", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while server.poll() is None and time.monotonic() < deadline:
            if is_listening(port):
                return server, port
            time.sleep(0.005)
    raise TimeoutError("ucx_perftest does not come up as a server")


def is_listening(port: int) -> bool:
    """Looks at the kernel's table: to connect would use up the server's one connection."""
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


# NIXL ---------------------------------------------------------------------------------------------


def nixl_pair(link: str, nbytes: int) -> Contender:
    """As it was fastest here."""
    return start_nixl(serve_nixl_writer, link, nbytes)


def default_nixl_pair(link: str, nbytes: int) -> Contender:
    """As it comes, only over tcp held to that."""
    return start_nixl(serve_default_nixl_writer, link, nbytes)


def start_nixl(serve_writer: Serve, link: str, nbytes: int) -> Contender:
    if importlib.util.find_spec("nixl_cu12") is None:
        raise ContenderFailed("nixl-cu12 is not installed")
    return Contender(serve_nixl_target, serve_writer, link, nbytes)


def import_nixl(link: str) -> ModuleType:
    if link == "tcp":
        os.putenv("UCX_TLS", "tcp")
    return importlib.import_module("nixl_cu12._api")


def serve_nixl_target(link: str, nbytes: int, pipe: Connection) -> None:
    api = import_nixl(link)
    agent = api.nixl_agent("target", api.nixl_agent_config(enable_prog_thread=True))
    pool = np.ones(nbytes, dtype=np.uint8)
    agent.register_memory([(pool.ctypes.data, nbytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), pool.ctypes.data))
    pipe.recv()


def serve_nixl_writer(link: str, nbytes: int, pipe: Connection) -> None:
    write_by_nixl(link, nbytes, pipe, has_thread=False)


def serve_default_nixl_writer(link: str, nbytes: int, pipe: Connection) -> None:
    write_by_nixl(link, nbytes, pipe, has_thread=True)


def write_by_nixl(link: str, nbytes: int, pipe: Connection, *, has_thread: bool) -> None:
    api = import_nixl(link)
    agent = api.nixl_agent("writer", api.nixl_agent_config(enable_prog_thread=has_thread))
    pool = np.ones(nbytes, dtype=np.uint8)
    agent.register_memory([(pool.ctypes.data, nbytes, 0, "")], "DRAM")
    metadata, target_address = pipe.recv()
    target = agent.add_remote_agent(metadata)
    pipe.send("ready")
    for plan in plans(pipe):
        zeros = np.zeros(plan.run_count, dtype=np.int64)
        source = np.stack([plan.source_offset + pool.ctypes.data, plan.nbytes, zeros], axis=1)
        landing = np.stack([plan.target_offset + target_address, plan.nbytes, zeros], axis=1)
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(source.astype(np.uint64), "DRAM"),
            agent.get_xfer_descs(landing.astype(np.uint64), "DRAM"),
            target,
        )
        with timed(pipe):
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
        agent.release_xfer_handle(handle)


# Mooncake -----------------------------------------------------------------------------------------


def mooncake_pair(link: str, nbytes: int) -> Contender:
    if importlib.util.find_spec("mooncake") is None:
        raise ContenderFailed("mooncake-transfer-engine is not installed")
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as exc:
        raise ContenderFailed(f"it can't be loaded: {exc}") from exc
    return Contender(serve_mooncake_target, serve_mooncake_writer, link, nbytes)


def import_mooncake() -> ModuleType:
    # By default a batch of more than 1024 runs is refused.
    os.putenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.putenv("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535")
    return importlib.import_module("mooncake.engine")


def serve_mooncake_target(link: str, nbytes: int, pipe: Connection) -> None:
    engine = import_mooncake().TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    pool = np.ones(nbytes, dtype=np.uint8)
    assert engine.register_memory(pool.ctypes.data, nbytes) == 0
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", pool.ctypes.data))
    pipe.recv()


def serve_mooncake_writer(link: str, nbytes: int, pipe: Connection) -> None:
    engine = import_mooncake().TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    pool = np.ones(nbytes, dtype=np.uint8)
    assert engine.register_memory(pool.ctypes.data, nbytes) == 0
    session, target_address = pipe.recv()
    pipe.send("ready")
    for plan in plans(pipe):
        sources = (plan.source_offset + pool.ctypes.data).tolist()
        targets = (plan.target_offset + target_address).tolist()
        sizes = plan.nbytes.tolist()
        with timed(pipe):
            assert engine.batch_transfer_sync_write(session, sources, targets, sizes) == 0


# Both ---------------------------------------------------------------------------------------------


def plans(pipe: Connection) -> Iterator[CopyPlan]:
    while True:
        plan = pipe.recv()
        assert isinstance(plan, CopyPlan)
        yield plan


@contextmanager
def timed(pipe: Connection) -> Iterator[None]:
    """Sends the seconds that the block took."""
    start = time.perf_counter()
    yield
    pipe.send(time.perf_counter() - start)
