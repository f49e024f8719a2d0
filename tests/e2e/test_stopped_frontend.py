"""A frontend that is stopped while many streams run, as by a debugger or a host that swaps: every
token waits for it, and nothing of an answer is lost.

In the first test frontend and scheduler are the real processes of a decode server that computes
prompts itself, and the engine is instant, so that a short stop is worth many tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from bench.http_load import body_of, post
from common.config import ServerConfig, write_config
from demo.servers import free_ports
from tests.e2e.fleet import Fleet, reply_of, wait_until
from tests.e2e.instant_worker import FIRST_TOKEN, InstantWorker, next_token
from tests.frontend.frontend_rig import decode_config

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STREAM_COUNT = 256
PATIENCE_S = 60.0  # only a failing test waits this long
PROMPTS = [[FIRST_TOKEN + index] for index in range(16)]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ServerConfig]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as runtime_dir:
        (port,) = free_ports(1)
        config = decode_config(
            tmp_path, port=port, runtime_dir=runtime_dir, prefill=(), worker_timeout_s=600.0
        )
        write_config(config)
        yield config


def is_ready(port: int) -> bool:
    """It listens before it has heard of its workers."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def started(module: str, config: ServerConfig) -> Iterator[int]:
    """A process of the server; its id."""
    process = subprocess.Popen([sys.executable, "-m", module, "--config", config.config_path])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def read_streams(port: int, token_count: int) -> list[bytes]:
    """The whole answers of streams that run at once."""

    async def read_one(index: int) -> bytes:
        body = {
            "prompt": PROMPTS[index % len(PROMPTS)],
            "max_tokens": token_count,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        request = post("/v1/completions", json.dumps(body).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        answer = await reader.read()
        writer.close()
        return answer

    return await asyncio.gather(*(read_one(index) for index in range(STREAM_COUNT)))


def token_ids_of(answer: bytes) -> list[int]:
    """Of a stream that came to its end."""
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    events = body_of(answer).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[-1]["finish_reason"] == "length"
    return [token_id for choice in choices for token_id in choice["token_ids"]]


def test_a_stopped_frontend_loses_no_token(config: ServerConfig) -> None:
    """More tokens wait than any socket has room for."""
    token_count = 200
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))  # ends when the servers have
        stack.enter_context(started("decode_server.scheduler_process", config))
        frontend = stack.enter_context(started("common.frontend", config))
        worker = stack.enter_context(InstantWorker(config, STREAM_COUNT))
        wait_until("the server to be ready", lambda: is_ready(config.port))
        streams = threads.submit(asyncio.run, read_streams(config.port, token_count))
        worker.wait_drawn(1)
        with stopped(frontend):
            worker.is_open.set()
            worker.wait_drawn(token_count)
        answers = [token_ids_of(answer) for answer in streams.result(PATIENCE_S)]
    for index, answer in enumerate(answers):
        expected = [PROMPTS[index % len(PROMPTS)][-1]]
        for _ in range(token_count):
            expected.append(next_token(expected[-1]))
        assert answer == expected[1:], index


@pytest.mark.soak
def test_a_pair_whose_frontend_is_stopped_for_ten_seconds_goes_on(fleet: Fleet) -> None:
    """With its supervisor and a real engine: nothing ends, no peer is lost, no token is missing."""
    prefill = fleet.prefill()
    decode = fleet.decode([prefill])
    fleet.wait_ready()
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
    expected = [decode.generate(body).output_ids for body in bodies]
    replies = [fleet.in_background(decode, body) for body in bodies]
    decode.wait_queued("running", len(bodies))
    with decode.frozen("common.frontend"):
        end_at = time.monotonic() + 10.0
        wait_until("ten seconds to be over", lambda: time.monotonic() > end_at)
    assert [reply_of(reply.result()).output_ids for reply in replies] == expected
    assert decode.get("/health").status_code == 200
    assert [node.info().counters["peers_lost"] for node in (prefill, decode)] == [0, 0]
    fleet.wait_at_rest()
