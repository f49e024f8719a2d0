"""Threads of a worker beside the engine's. Each is on the rank's device, and a failure of one ends
the worker. Knows nothing of their work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class DeviceThread:
    """fail: called after a log line if `work` raises."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        work: Callable[[], None],
        fail: Callable[[], None],
    ) -> None:
        self._name = name
        self._device = device
        self._work = work
        self._fail = fail
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """timeout_s: after which it is left behind, and ends with the process; None: never."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            # A thread begins on the first device. Its first CUDA call, for pinned memory or events
            # too, would make a context there, which costs half a GiB per rank.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._work()
        except Exception:
            log.error("the %s thread failed", self._name, exc_info=True)
            self._fail()


class JobThread(Generic[Job, Answer]):
    """Runs jobs in order and hands over their answers. fail: ends the worker.

    jobs: from the I/O thread; None ends the thread, behind the jobs that came before.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        run: Callable[[Job], Answer],
        answer: Callable[[Answer], None],
        fail: Callable[[], None],
    ) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._run_job = run
        self._answer = answer
        self._thread = DeviceThread(name, device, self._run, fail)

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout_s: float | None = None) -> None:
        self.jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self._answer(self._run_job(job))
