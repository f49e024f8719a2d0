"""Threads of a worker beside the engine's. Each is on the rank's device, and a failure of one ends
the worker. Knows nothing of their work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


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

    def join(self) -> None:
        self._thread.join()

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
