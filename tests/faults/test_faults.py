"""A few quick faults on a real pair; `python -m tests.faults` has all of them."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.faults.__main__ import run_all
from tests.faults.cases import CASES, TRANSPORTS, draw_schedule, find_cases
from tests.faults.run import Report
from tests.faults.scenes import COMMON_ARGS, Settings
from tests.soak.servers import Part, send_signal, start_lone
from tests.soak.verdicts import Payload, Verdict

NAMES = ("kill-prefill-worker",)
SETTINGS = Settings(client_count=6, seed=3, golden_count=16, request_timeout_s=8.0)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """On a pair of its own."""
    told = asyncio.run(run_all(find_cases(",".join(NAMES)), ("shm",), 0.0, SETTINGS)).reports
    return {report.name.removeprefix("shm "): report for report in told}


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_costs_no_hang_no_wrong_token_and_no_page(
    reports: dict[str, Report], name: str
) -> None:
    report = reports[name]
    assert report.problems == []
    assert report.counts[Verdict.RIGHT] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_worker_that_dies_costs_its_clients_an_error_and_no_connection() -> None:
    # A socket of the server has a path of 107 bytes at most, and lies beside the log.
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        text = asyncio.run(read_while_worker_dies(Path(directory) / "lone.log"))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    last = msgspec.json.decode(lines[-2], type=Payload)
    assert last.meta_info is not None and last.meta_info.finish_reason is not None
    finish = last.meta_info.finish_reason
    # Its frontend hears that the scheduler is lost, or first that it has to stop itself.
    assert finish.type == "abort" and finish.status_code in (500, 503)
    assert finish.message


async def read_while_worker_dies(log_path: Path) -> str:
    """All that a client reads of a stream in whose midst the worker is killed."""
    server = await start_lone(COMMON_ARGS, log_path)
    sampling = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
    text = ""
    try:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60.0) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            async for piece in response.aiter_text():
                if not text:
                    send_signal(server.pids()[Part.WORKER], signal.SIGKILL)
                text += piece
        while server.is_running:
            await asyncio.sleep(0.1)
    finally:
        server.kill()
    assert server.process is not None and server.process.returncode == 1
    return text


def test_case_names_are_unique_and_every_case_runs_somewhere() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(set(case.transports) <= set(TRANSPORTS) and case.transports for case in CASES)


def test_a_schedule_has_its_faults_and_takes_every_case_as_often_as_any() -> None:
    cases = find_cases("kill-prefill-worker,kill-both-servers,freeze-decode-worker")
    schedule = draw_schedule(cases, 20, "1 shm")
    assert sum(len(case.faults) for case in schedule) in (20, 21)
    counts = [schedule.count(case) for case in cases]
    assert max(counts) - min(counts) <= 1
    assert schedule == draw_schedule(cases, 20, "1 shm") != draw_schedule(cases, 20, "2 shm")


def test_an_unknown_case_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="no-such-case: must be of kill-prefill-worker"):
        find_cases("kill-prefill-worker,no-such-case")
