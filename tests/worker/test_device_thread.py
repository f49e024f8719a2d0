"""Every thread of a worker works on the rank's device."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import common
from common.worker.device_thread import DeviceThread, JobThread

SOURCES = Path(common.__file__).parent


def run(device: torch.device, said: list[object]) -> None:
    def work() -> None:
        said.append("works")

    thread = DeviceThread("test", device, work, lambda: said.append("failed"))
    thread.start()
    thread.join()


def test_a_thread_takes_its_device_before_it_does_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []

    def set_device(device: torch.device) -> None:
        said.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    second = torch.device("cuda", 1)
    run(second, said)
    assert said == [("test", second), "works"]
    said.clear()
    run(torch.device("cpu"), said)
    assert said == ["works"]


def test_a_device_that_can_not_be_taken_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def set_device(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    said: list[object] = []
    run(torch.device("cuda", 0), said)
    assert said == ["failed"]
    assert "the test thread failed" in caplog.text and "out of memory" in caplog.text


def test_jobs_are_answered_in_order_until_the_end() -> None:
    said: list[object] = []
    thread = JobThread[int, int](
        "test", torch.device("cpu"), lambda job: job * 2, said.append, lambda: said.append("failed")
    )
    for job in range(100):
        thread.jobs.put(job)
    thread.start()
    thread.end()
    assert said == [2 * job for job in range(100)]


def test_a_job_that_fails_ends_the_worker_and_no_later_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[object] = []
    thread = JobThread[int, float](
        "test", torch.device("cpu"), lambda job: 1 / job, said.append, lambda: said.append("failed")
    )
    for job in (1, 0, 2):
        thread.jobs.put(job)
    thread.start()
    thread.end()
    assert said == [1.0, "failed"]
    assert "the test thread failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_worker_starts_no_thread_that_does_not() -> None:
    packages = [SOURCES / name for name in ("worker", "engine", "transport")]
    makers = {
        path.name
        for package in packages
        for path in package.rglob("*.py")
        if "threading.Thread(" in path.read_text()
    }
    assert makers == {"device_thread.py"}
