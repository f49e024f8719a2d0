"""One record is one line, whatever is in it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from common.log import FRAME_COUNT_MAX, describe

SCRIPT = """
import logging
from common.log import setup_log
setup_log("decode", "worker-1", "info")
log = logging.getLogger("a.library")
log.debug("hidden")
log.info("two\\nlines %d", 5)
try:
    raise ValueError("bad\\nvalue")
except ValueError:
    log.exception("it failed")
"""


@pytest.mark.slow
def test_a_record_is_one_line_with_time_level_role_and_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    first, second = done.stderr.splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(rf"{stamp} info \[decode/worker-1\] two\\nlines 5", first)
    assert re.fullmatch(
        rf"{stamp} error \[decode/worker-1\] it failed: ValueError: bad\\nvalue at "
        r"<string>:9 <module>",
        second,
    )
    assert done.stdout == ""


def fall(depth: int) -> None:
    if depth == 0:
        raise KeyError("deep")
    fall(depth - 1)


def test_an_exception_is_told_innermost_first_with_its_cause_and_bounded() -> None:
    try:
        try:
            fall(50)
        except KeyError as exc:
            raise RuntimeError("outer") from exc
    except RuntimeError as exc:
        line = describe(exc)
    outer, inner = line.split("; caused by ")
    assert outer.startswith("RuntimeError: outer at ") and "test_log.py" in outer
    assert inner.startswith("KeyError: 'deep' at ")
    assert inner.count(" < ") == FRAME_COUNT_MAX - 1
    assert logging.getLogger().level == logging.WARNING, "describing sets nothing up"
