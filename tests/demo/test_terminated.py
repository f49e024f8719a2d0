"""A demo that is told to stop leaves no server behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet import children_of, is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
ROOT = Path(__file__).parents[2]


def test_a_terminated_demo_stops_its_servers() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "demo", "--questions", "1"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_until("both servers to be started", lambda: len(children_of(demo.pid)) == 2)
        servers = children_of(demo.pid)
        wait_until("processes of both", lambda: all(map(children_of, servers)))
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 128 + signal.SIGTERM
        assert not any(map(is_alive, servers))
    finally:
        demo.kill()
        demo.wait()
