"""A server that finds no room for its sockets and settings says so, to be started again later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.exit_codes import EXIT_START_AGAIN
from demo.servers import free_ports
from tests.soak.servers import CHECKPOINT

# A file of one byte is too large; Python makes an error of it.
NO_BYTES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"


@pytest.mark.slow
@pytest.mark.parametrize("has_directory", [False, True])
def test_without_room_for_its_sockets_a_server_asks_to_be_started_again(
    tmp_path: Path, *, has_directory: bool
) -> None:
    program = f"{NO_BYTES}; import sys, tempfile; from decode_server.__main__ import main"
    # Some directory must seem to be there: whether it takes files is found out later.
    setting = f"tempfile.tempdir = {str(tmp_path)!r}" if has_directory else "pass"
    flags = ["--model-path", str(CHECKPOINT), "--port", str(free_ports(1)[0]), "--prefill", "none"]
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {setting}; sys.exit(main())", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == EXIT_START_AGAIN, done.stderr
    # Whoever starts also tidies up after servers that other tests have killed.
    said = [line for line in done.stderr.splitlines() if "of a server that was killed" not in line]
    assert len(said) == 1 and "set TMPDIR" in said[0]
    assert list(tmp_path.iterdir()) == []
