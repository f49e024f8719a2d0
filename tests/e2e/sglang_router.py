"""SGLang's own router, the one from PyPI, in front of servers of a fleet.

It is configured to notice quickly what comes and goes; everything else is as it comes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from demo.servers import free_ports
from tests.e2e.fleet import CLIENT_COUNT_MAX, WAIT_TIMEOUT_S, Body, Node, wait_until

FLAGS = (
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    *("--cb-timeout-duration-secs", "2", "--log-level", "info"),
)


@dataclass
class SglangRouter:
    """One running router. Its clients give up after a while, so no test hangs."""

    url: str
    metrics_url: str
    client: httpx.Client
    log_path: Path

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def post(self, path: str, body: Body | None = None) -> httpx.Response:
        return self.client.post(self.url + path, json=body)

    def is_ready(self) -> bool:
        """Whether it answers, and has found every server that it needs."""
        try:
            return self.get("/readiness").status_code == 200
        except httpx.TransportError:
            return False

    def healthy_count(self) -> int:
        """Servers that it would send requests to."""
        answer = msgspec.json.decode(self.get("/workers").content, type=Workers)
        return sum(worker.is_healthy for worker in answer.workers)

    def wait_healthy(self, count: int) -> None:
        wait_until(f"the router to see {count} servers", lambda: self.healthy_count() == count)

    def retry_count(self) -> float:
        """Attempts that it made again, so far."""
        lines = self.client.get(self.metrics_url).text.splitlines()
        found = [line for line in lines if line.startswith("smg_worker_retries_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in found)


class Worker(msgspec.Struct):
    url: str
    is_healthy: bool
    model_id: str = ""


class Workers(msgspec.Struct):
    workers: list[Worker]


@contextmanager
def sglang_router(
    prefills: Sequence[Node],
    decodes: Sequence[Node],
    log_path: Path,
    *args: str,
    prefill_host: str = "127.0.0.1",
) -> Iterator[SglangRouter]:
    """A router that is about to find its servers; gone when the block ends.

    prefill_host: what it calls the prefill servers' host, and tells decode servers.
    """
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    for node in prefills:
        command += ["--prefill", f"http://{prefill_host}:{node.port}", str(node.bootstrap_port)]
    for node in decodes:
        command += ["--decode", node.url]
    limits = httpx.Limits(max_connections=2 * CLIENT_COUNT_MAX)
    with log_path.open("wb") as log, httpx.Client(timeout=WAIT_TIMEOUT_S, limits=limits) as client:
        process = subprocess.Popen(
            [*command, *FLAGS, *args],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            yield SglangRouter(url, f"http://127.0.0.1:{metrics_port}/metrics", client, log_path)
        finally:
            process.kill()  # asked nicely, it waits for its clients
            process.wait()
