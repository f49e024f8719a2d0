"""The cost of the frontend: 256 streams of an engine that never waits, against a bare uvicorn.

Real are the frontend process, its HTTP, tokenizer and metrics, and the channel. The reference
sends the same events from memory. CPU seconds are of the serving process alone, so that they hold
on a machine that others use too; requests per second are of the whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import uvloop

from bench.http_load import Load, body_of, post, run_load
from bench.instant_engine import CLIENTS, COUNT_NBYTES
from bench.report import Row, at_least, row_of_medians
from common.channel.local import LocalClient
from common.channel.sockets import SendResult
from common.clock import SystemClock
from common.config import Role, ServerConfig, write_config
from common.frontend.text.tokenizer import load_tokenizer
from demo.__main__ import CHECKPOINT
from demo.servers import free_ports

CLIENT_COUNT = 256
PATH = "/v1/completions"
STREAM_TOKEN_COUNT = 32
# Of a sample, so that the 10 ms units of CPU time are a few percent at most.
ANSWER_COUNTS = {"stream": 512, "whole": 1024}
SAMPLE_COUNT = 7
# Of a bare server's: tokens or answers per CPU second, and streams per second of the whole, which
# has the client and the engine on the same cores.
STREAM_PER_CPU_MIN = 0.6
SHORT_PER_CPU_MIN = 0.4
STREAMS_PER_S_MIN = 0.5
PROMPT = "The code of Ada is 42. What is the code of Ada?"
START_RETRY_COUNT = 12  # pauses double from half a second
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one server. cpu_s: of the serving process. answer: the body of one of them."""

    wall_s: float
    cpu_s: float
    answer_count: int
    event_count: int
    answer: bytes = b""

    @property
    def unit_count(self) -> int:
        """Tokens of streams, else answers."""
        return self.event_count or self.answer_count


def run() -> list[Row]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        frontend = stack.enter_context(start_frontend(directory))
        bodies = {
            "stream": _body(STREAM_TOKEN_COUNT, is_streaming=True),
            "whole": _body(1, is_streaming=False),
        }
        answers = {name: frontend.take(PATH, body, 1, 1).answer for name, body in bodies.items()}
        bare = stack.enter_context(start_bare(directory, answers["stream"], answers["whole"]))
        taken: dict[str, list[Sample]] = {name: [] for name in (*bodies, *map(bare_name, bodies))}
        for _ in range(SAMPLE_COUNT + 1):
            for name, body in bodies.items():
                count = ANSWER_COUNTS[name]
                taken[name].append(frontend.take(PATH, body, count, CLIENT_COUNT))
                path = f"/{name}"
                taken[bare_name(name)].append(bare.take(path, body, count, CLIENT_COUNT))
        return rows_of({name: samples[1:] for name, samples in taken.items()})


def bare_name(name: str) -> str:
    return f"bare {name}"


def rows_of(taken: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """taken: samples by name, "stream" and "whole", each with its "bare" reference."""

    def pair(name: str, value_of: Callable[[Sample], float]) -> tuple[list[float], list[float]]:
        own, bare = taken[name], taken[bare_name(name)]
        return [value_of(one) for one in own], [value_of(one) for one in bare]

    own_us, bare_us = pair("stream", lambda one: 1e6 * one.cpu_s / one.event_count)
    overhead_us = [own - bare for own, bare in zip(own_us, bare_us, strict=True)]
    rows = [
        row_of_medians("frontend_overhead_per_token", "us cpu", overhead_us, "bare event", bare_us)
    ]
    for name, load, unit, rate_of, ratio_min in (
        ("frontend_tokens_per_cpu_s", "stream", "/s cpu", _units_per_cpu_s, STREAM_PER_CPU_MIN),
        ("frontend_stream_requests", "stream", "/s", _answers_per_s, STREAMS_PER_S_MIN),
        ("frontend_short_per_cpu_s", "whole", "/s cpu", _units_per_cpu_s, SHORT_PER_CPU_MIN),
        ("frontend_short_requests", "whole", "/s", _answers_per_s, None),
    ):
        values, references = pair(load, rate_of)
        target = None if ratio_min is None else at_least(ratio_min)
        rows.append(row_of_medians(name, unit, values, "bare", references, target))
    return rows


def _units_per_cpu_s(one: Sample) -> float:
    return one.unit_count / one.cpu_s


def _answers_per_s(one: Sample) -> float:
    return one.answer_count / one.wall_s


@dataclass(frozen=True, slots=True)
class Served:
    """A process that answers HTTP. tell_read: see `Load`."""

    pid: int
    port: int
    tell_read: Callable[[int], None] | None = None

    def take(self, path: str, body: bytes, answer_count: int, client_count: int) -> Sample:
        load = Load(post(path, body), answer_count, self.tell_read)
        began_s = cpu_s_of(self.pid)
        wall_s = uvloop.run(run_load(self.port, load, client_count))
        cpu_s = cpu_s_of(self.pid) - began_s
        assert load.statuses == {b"HTTP/1.1 200 OK": answer_count}, load.statuses
        return Sample(wall_s, cpu_s, answer_count, load.event_count, body_of(load.sample))


def cpu_s_of(pid: int) -> float:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def start_frontend(directory: Path) -> Iterator[Served]:
    """A frontend process with an instant engine behind it."""
    (port,) = free_ports(1)
    config = ServerConfig(
        role=Role.DECODE,
        model_path=str(CHECKPOINT),
        tokenizer_path=str(CHECKPOINT),
        served_model_name="bench",
        port=port,
        log_level="warning",
        runtime_dir=str(directory),
    )
    write_config(config)
    ids = load_tokenizer(config.tokenizer_path, SystemClock().wall).encode(PROMPT)
    outputs = ",".join(map(str, ids))
    with (
        start("bench.instant_engine", config.frontend_ipc_path, outputs),
        start("common.frontend", "--config", config.config_path) as process,
    ):
        clients = LocalClient(config.frontend_ipc_path, CLIENTS)

        def tell_read(count: int) -> None:
            sent = clients.send(count.to_bytes(COUNT_NBYTES, "little"))
            assert sent is SendResult.SENT

        wait_for(f"http://127.0.0.1:{port}/health")
        try:
            yield Served(process.pid, port, tell_read)
        finally:
            clients.close()


@contextmanager
def start_bare(directory: Path, events: bytes, reply: bytes) -> Iterator[Served]:
    (port,) = free_ports(1)
    files = [directory / "events", directory / "reply"]
    for file, content in zip(files, (events, reply), strict=True):
        file.write_bytes(content)
    with start("bench.bare_stream", str(port), *map(str, files)) as process:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield Served(process.pid, port)


@contextmanager
def start(module: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, *args])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(url: str) -> None:
    """Until there is a good answer, or none for long. Raises: httpx.HTTPError."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=START_RETRY_COUNT)) as client:
        client.get(url, timeout=60.0).raise_for_status()


def _body(token_count: int, *, is_streaming: bool) -> bytes:
    return orjson.dumps(
        {"prompt": PROMPT, "max_tokens": token_count, "stream": is_streaming, "ignore_eos": True}
    )
