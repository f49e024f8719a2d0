"""Threads of a worker beside the engine's: each on the rank's device, each ends the worker if it
fails. Knows nothing of what they do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


class DeviceThread:
    """fail: called with a log line behind it if `work` raises."""

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
            # A thread begins with the first device. Whatever it asks of CUDA, pinned memory and
            # events included, would make a context there that costs every rank half a GiB.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._work()
        except Exception:
            log.error("the %s thread failed", self._name, exc_info=True)
            self._fail()
