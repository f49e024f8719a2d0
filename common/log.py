"""One line per record on stderr: time, level, [role/process], message. Set up once per process.

Knows nothing of settings beyond what it is given.
"""

from __future__ import annotations

import logging
import sys
import traceback

FRAME_COUNT_MAX = 8  # innermost frames of a traceback; outer ones are event loops


class _Line(logging.Formatter):
    """A record as one line, with an exception's frames innermost first, so that grep finds all."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {describe(record.exc_info[1])}"
        when = self.formatTime(record)
        level = record.levelname.lower()
        escaped = message.replace("\r", "\\r").replace("\n", "\\n")
        return f"{when} {level} [{self._fmt}] {escaped}"


def setup_log(role: str, process: str, level: str) -> None:
    """Log to stderr from `level` on ("debug", "info", "warning", "error"), in every library too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(f"{role}/{process}", validate=False))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def describe(error: BaseException) -> str:
    """An exception in one line: its type and text, and where it came from, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAME_COUNT_MAX:]
    path = " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames))
    where = f" at {path}" if path else ""
    cause = f"; caused by {describe(error.__cause__)}" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{where}{cause}"
