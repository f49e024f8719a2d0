"""The frontend as a process: it says at once what it can't be, serves, drains, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from common.config import ServerConfig, write_config
from common.exit_codes import EXIT_START_AGAIN
from common.protocol.frontend import Cancel, Drain
from tests.frontend.frontend_rig import decode_config
from tests.frontend.scripted_scheduler import ScriptedScheduler

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
START_TIMEOUT_S = 30.0

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ServerConfig]:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as runtime_dir:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = decode_config(tmp_path, port=port, runtime_dir=runtime_dir)
        write_config(config)
        yield config


@pytest.fixture
def scheduler(config: ServerConfig) -> Iterator[ScriptedScheduler]:
    with ScriptedScheduler(Path(config.frontend_ipc_path)) as scheduler:
        yield scheduler


@pytest.fixture
def start(config: ServerConfig) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "common.frontend", "--config", config.config_path]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def http(config: ServerConfig) -> httpx.Client:
    """A client that tries again until the port listens; the tries end with START_TIMEOUT_S."""
    transport = httpx.HTTPTransport(retries=12)  # pauses double from half a second
    return httpx.Client(
        base_url=f"http://127.0.0.1:{config.port}", transport=transport, timeout=START_TIMEOUT_S
    )


def test_it_serves_without_torch_and_ends_with_0(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    process = start()
    with http(config) as client:
        assert client.get("/ping").status_code == 200
        scheduler.wait_for(lambda s: bool(s.seen))
        text = client.post(
            "/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 3}}
        ).json()
        assert text["output_ids"] == [6, 7, 8]
        assert client.get("/health").status_code == 200
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in mapped
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, errors
    assert "listening on http://127.0.0.1:" in errors


def test_a_port_in_use_is_one_line_and_exit_code_75(config: ServerConfig, start: Start) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", config.port))
        holder.listen()
        process = start()
        _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == EXIT_START_AGAIN
    assert errors == (
        f"baton frontend: --host 127.0.0.1 --port {config.port}: "
        "can't be bound: Address already in use\n"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_here_is_one_line_and_exit_code_75(
    config: ServerConfig, start: Start, host: str
) -> None:
    write_config(msgspec.structs.replace(config, host=host))
    process = start()
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == EXIT_START_AGAIN
    assert errors.count("\n") == 1 and f"--host {host}" in errors


def test_a_tokenizer_that_can_not_be_read_is_one_line_and_exit_code_2(
    config: ServerConfig, start: Start
) -> None:
    Path(config.tokenizer_path, "tokenizer.json").write_text("{")
    process = start()
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert errors.count("\n") == 1 and "tokenizer.json" in errors


def test_stopping_lets_an_open_stream_end_well(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    scheduler.holds = True
    process = start()
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    with http(config) as client, ThreadPoolExecutor(1) as thread:
        assert client.get("/ping").status_code == 200
        scheduler.wait_for(lambda s: bool(s.seen))
        reply = thread.submit(client.post, "/generate", json=body)
        scheduler.wait_for(lambda s: bool(s.held))
        process.send_signal(signal.SIGTERM)
        scheduler.release()
        lines = [line for line in reply.result().text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["output_ids"] == [6, 7, 8]
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0


def test_a_stopping_server_is_not_healthy_and_sends_new_requests_away(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    scheduler.holds = True
    process = start()
    with http(config) as client, ThreadPoolExecutor(1) as thread:
        assert client.get("/ping").status_code == 200
        scheduler.wait_for(lambda s: bool(s.seen))
        reply = thread.submit(client.post, "/generate", json={"input_ids": [5]})
        scheduler.wait_for(lambda s: bool(s.held))
        process.send_signal(signal.SIGTERM)
        scheduler.wait_for(lambda s: any(isinstance(message, Drain) for message in s.seen))
        health, refused = client.get("/health"), client.post("/generate", json={"input_ids": [6]})
        assert (health.status_code, refused.status_code) == (503, 503)
        assert health.headers["retry-after"] and refused.headers["retry-after"]
        scheduler.release()
        assert reply.result().status_code == 200
    process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0


def test_stopping_without_a_scheduler_answers_what_is_open_at_once(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    scheduler.holds = True
    process = start()
    with http(config) as client, ThreadPoolExecutor(1) as thread:
        assert client.get("/ping").status_code == 200
        scheduler.wait_for(lambda s: bool(s.seen))
        reply = thread.submit(client.post, "/generate", json={"input_ids": [5]})
        scheduler.wait_for(lambda s: bool(s.held))
        scheduler.is_silent = True
        process.send_signal(signal.SIGTERM)
        assert reply.result().status_code == 503
        assert "stopping" in reply.result().json()["error"]["message"]
    process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_what_is_open_when_the_drain_is_over_gets_a_typed_error(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start, path: str
) -> None:
    write_config(msgspec.structs.replace(config, drain_timeout_s=0.5))
    scheduler.holds = True
    process = start()
    with http(config) as client, ThreadPoolExecutor(1) as thread:
        assert client.get("/ping").status_code == 200
        scheduler.wait_for(lambda s: bool(s.seen))
        prompt = "prompt" if path.startswith("/v1") else "input_ids"
        reply = thread.submit(client.post, path, json={prompt: [5]})
        scheduler.wait_for(lambda s: bool(s.held))
        process.send_signal(signal.SIGTERM)
        assert reply.result().status_code == 503
        assert "stopping" in reply.result().json()["error"]["message"]
    scheduler.wait_for(lambda s: any(isinstance(message, Cancel) for message in s.seen))
    process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0


def raw_answer(config: ServerConfig, request: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", config.port), START_TIMEOUT_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_what_says_its_length_twice_or_has_headers_beyond_the_bound_is_refused_for_good(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    start()
    with http(config) as client:
        assert client.get("/ping").status_code == 200
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    twice = head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    answer = raw_answer(config, twice)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"only one may be given" in answer
    long = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n"
    answer = raw_answer(config, long)
    # As a whole it is answered by us, in pieces by the server below.
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_bytes_that_are_no_request_are_told_of_with_their_address_and_in_bounds(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    process = start()
    with http(config) as client:
        assert client.get("/ping").status_code == 200
    for _ in range(100):
        assert raw_answer(config, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    lines = [line for line in errors.splitlines() if "no HTTP request" in line]
    assert 1 <= len(lines) < 60 and all("127.0.0.1:" in line for line in lines)
    assert "Invalid HTTP request received" not in errors


def test_a_scheduler_that_talks_nonsense_ends_the_process(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    process = start()
    scheduler.wait_for(lambda s: bool(s.seen))
    scheduler.send_raw(b"nonsense")
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode not in (0, None)
    assert "ProtocolError" in errors


def test_the_resident_memory_of_an_idle_frontend_is_small(
    config: ServerConfig, scheduler: ScriptedScheduler, start: Start
) -> None:
    process = start()
    with http(config) as client:
        assert client.get("/ping").status_code == 200
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") < 250e6, "a frontend without torch takes about 100 MB"
