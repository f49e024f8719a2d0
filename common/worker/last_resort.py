"""Ends a process that has failed and whose engine does not return.

The engine may wait for ranks that wait for this rank, or for a device that hangs. Peers must not
wait for it.
"""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)


def end_process_after(patience_s: float, exit_code: int) -> None:
    """End the process after `patience_s`, unless it ends before."""
    timer = threading.Timer(patience_s, _end_process, (patience_s, exit_code))
    timer.daemon = True
    timer.start()


def _end_process(patience_s: float, exit_code: int) -> None:
    log.error("the engine did not end within %g s: the process ends without it", patience_s)
    logging.shutdown()
    os._exit(exit_code)
