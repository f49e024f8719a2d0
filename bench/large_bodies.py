"""The effect of ten bodies of 30 MB on a stream that runs beside them, and on memory afterwards.

    python -m bench.large_bodies PORT KIND     sends them, as a process of its own

Real are the frontend process, its HTTP and tokenizer. The stream's engine makes a token PACE_S
after the last one was read, so a gap is that pace and what the frontend adds.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import orjson

from bench.frontend import PATH, PROMPT, Served, start_frontend
from bench.http_load import EVENT_START, post
from bench.report import Row, at_most, row_of_medians

BODY_COUNT = 10
BODY_NBYTES = 30_000_000
PACE_S = 0.02
TOKEN_COUNT = 50
QUIET_STREAM_COUNT = 5
SAMPLE_COUNT = 3
GAP_RATIO_MAX = 2.0
MEMORY_RATIO_MAX = 1.1
KINDS = ("text", "ids")
WORD = "code "
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """p99 of the gaps of a running stream, in ms. statuses: answers to the bodies meanwhile."""

    gap_p99_ms: float
    statuses: dict[str, int]


def run() -> list[Row]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))
        frontend = stack.enter_context(start_frontend(Path(directory)))
        send_bodies(frontend.port, "text")  # what is made once, like threads, is not measured
        before_mib = resident_mib(frontend.pid)
        rows = [row_of(frontend, kind) for kind in KINDS]
        after_mib = resident_mib(frontend.pid)
        name, target = "frontend_memory_after_large_bodies", at_most(MEMORY_RATIO_MAX)
        return [*rows, row_of_medians(name, "MiB", [after_mib], "before", [before_mib], target)]


def row_of(frontend: Served, kind: str) -> Row:
    quiet_ms, loaded_ms = [], []
    for _ in range(SAMPLE_COUNT):
        quiet_ms.append(asyncio.run(watch(frontend)).gap_p99_ms)
        beside = asyncio.run(watch(frontend, kind))
        assert set(beside.statuses) <= {"400", "503"}, beside.statuses
        loaded_ms.append(beside.gap_p99_ms)
    name = f"stream_gap_p99_beside_large_{kind}"
    # Ten million numbers are made while no other thread runs; their cost is reported without a
    # target.
    target = at_most(GAP_RATIO_MAX) if kind == "text" else None
    return row_of_medians(name, "ms", loaded_ms, "alone", quiet_ms, target)


async def watch(frontend: Served, kind: str = "") -> Sample:
    """The gaps of a stream after another while bodies of a kind are sent, or of as many without."""
    gaps_s: list[float] = []
    if not kind:
        for _ in range(QUIET_STREAM_COUNT):
            gaps_s += await read_stream(frontend)
        return Sample(1000 * p99(gaps_s), {})
    command = (sys.executable, "-m", "bench.large_bodies", str(frontend.port), kind)
    sending = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    told = asyncio.create_task(sending.communicate())
    while not told.done():
        gaps_s += await read_stream(frontend)
    return Sample(1000 * p99(gaps_s), orjson.loads((await told)[0]))


async def read_stream(frontend: Served) -> list[float]:
    """Seconds between the tokens of one stream."""
    assert frontend.tell_read is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
    body = {"prompt": PROMPT, "max_tokens": TOKEN_COUNT, "stream": True, "ignore_eos": True}
    writer.write(post(PATH, orjson.dumps(body)))
    times_s: list[float] = []
    while len(times_s) < TOKEN_COUNT:
        data = await asyncio.wait_for(reader.read(1 << 16), TIMEOUT_S)
        assert data, "the frontend closed the stream"
        for _ in range(data.count(EVENT_START)):
            times_s.append(time.perf_counter())
            await asyncio.sleep(PACE_S)
            frontend.tell_read(1)
    writer.close()
    return [later - earlier for earlier, later in pairwise(times_s)]


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def body_of(kind: str) -> bytes:
    """One prompt in a body of BODY_NBYTES."""
    if kind == "text":
        return orjson.dumps({"prompt": WORD * (BODY_NBYTES // len(WORD)), "max_tokens": 1})
    return orjson.dumps({"prompt": [17] * (BODY_NBYTES // 3), "max_tokens": 1})


def send_bodies(port: int, kind: str) -> dict[str, int]:
    """All at once, each over a connection of its own; the answers' statuses, counted."""

    async def send_all() -> dict[str, int]:
        content = body_of(kind)
        headers = {"Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=BODY_COUNT)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            url = f"http://127.0.0.1:{port}{PATH}"
            asked = [client.post(url, content=content, headers=headers) for _ in range(BODY_COUNT)]
            replies = await asyncio.gather(*asked)
        return dict(Counter(str(reply.status_code) for reply in replies))

    return asyncio.run(send_all())


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(send_bodies(int(sys.argv[1]), sys.argv[2])))
