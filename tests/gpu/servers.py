"""Servers that the GPU check starts, one alone or a pair, and one client of them.

Knows nothing of what is asked, or of what is measured with the answers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from demo.servers import Server, free_ports, start_server, stop_servers
from tests.gpu.model_shapes import ModelShape

# The first start on a machine compiles attention kernels, and both servers load at once.
READY_TIMEOUT_S = 420.0
REQUEST_TIMEOUT_S = 300.0
CONCURRENT_COUNT = 16


class TransferTimes(msgspec.Struct):
    transfer_s: float
    nbytes: int
    run_count: int


class Timeline(msgspec.Struct):
    transfer: TransferTimes
    ttft_s: float


class Meta(msgspec.Struct):
    completion_tokens: int
    timeline: Timeline | None = None


class Reply(msgspec.Struct):
    """What is read of an answer of /generate, or of one event of its stream."""

    output_ids: list[int]
    meta_info: Meta


@dataclass(slots=True)
class Running:
    """Servers that are up; the last one answers."""

    servers: list[Server]
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            timeout=REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=CONCURRENT_COUNT)
        )
    )

    @property
    def url(self) -> str:
        return self.servers[-1].url

    def generate(self, prompt: list[int], token_count: int) -> Reply:
        response = self.client.post(f"{self.url}/generate", json=body_of(prompt, token_count))
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=Reply)

    def stream_times(self, prompt: list[int], token_count: int) -> list[float]:
        """Seconds from sending to each event that brought new tokens."""
        times: list[float] = []
        body = body_of(prompt, token_count) | {"stream": True}
        started_at = time.perf_counter()
        with self.client.stream("POST", f"{self.url}/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and not line.endswith("[DONE]"):
                    times.append(time.perf_counter() - started_at)
        return times


@contextmanager
def servers(
    model: Path, device: str, shape: ModelShape, *, is_pair: bool, pool_tokens: int | None = None
) -> Iterator[Running]:
    """pool_tokens: of the server that decodes; a prefill server's pages are free again soon."""
    decode_port, prefill_port, bootstrap_port = free_ports(3)
    flags = ["--device", device, "--load-format", "dummy", "--dtype", "bfloat16"]
    flags += ["--context-length", "16384"]
    # A cached prefix would change the shapes of a pass, and so the last bits.
    flags += ["--disable-radix-cache"]
    log_dir = Path(tempfile.mkdtemp(prefix="baton-gpu-logs-"))
    started: list[Server] = []

    def start(role: str, port: int, token_count: int, *args: str) -> None:
        args = (*args, "--max-total-tokens", str(token_count))
        started.append(start_server(role, port, *args, *flags, model_path=model, log_dir=log_dir))

    try:
        if is_pair:
            start(
                "prefill", prefill_port, shape.pool_tokens, "--bootstrap-port", str(bootstrap_port)
            )
        dial = f"127.0.0.1:{bootstrap_port}" if is_pair else "none"
        start("decode", decode_port, pool_tokens or shape.pool_tokens, "--prefill", dial)
        running = Running(started)
        for server in started:
            wait_ready(server)
        yield running
        running.client.close()
    except Exception as error:
        words = "\n".join(f"{s.name}: {s.last_words()}" for s in started)
        raise RuntimeError(f"{error}\n{words}") from error
    finally:
        stop_servers(started)


def wait_ready(server: Server) -> None:
    """Raises: RuntimeError if the server ends or takes too long."""
    end_at = time.monotonic() + READY_TIMEOUT_S
    while server.process.poll() is None and time.monotonic() < end_at:
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    code = server.process.returncode
    what = f"is not ready after {READY_TIMEOUT_S:.0f} s" if code is None else f"ended with {code}"
    raise RuntimeError(f"the {server.name} server {what}")


def body_of(prompt: list[int], token_count: int) -> dict[str, object]:
    sampling = {"temperature": 0.0, "max_new_tokens": token_count, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}
