"""What the system says of processes: whether one is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from common.stopped import is_stopped


def test_a_process_is_stopped_from_sigstop_to_sigcont() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid), "it has ended"


def test_a_name_that_looks_like_a_state_does_not_matter(tmp_path: Path) -> None:
    program = tmp_path / "a) T 1"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        assert not is_stopped(process.pid)
        process.kill()
