"""What a killed server left behind is removed at the next start, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.runtime.private_dirs import LOCK, make_private_dir, remove_those_of_the_dead

KILLED = """
import os, signal, sys
from pathlib import Path
from common.runtime.private_dirs import make_private_dir
made = make_private_dir(Path(sys.argv[1]), "decode")
(made.path / "ucx_shm_posix_1").write_bytes(bytes(1 << 16))
print(made.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_directories_of_dead_supervisors_are_removed(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    dead = Path(ended.stdout.strip())
    assert list(dead.iterdir()), "it was killed"
    living = make_private_dir(tmp_path, "prefill")
    others = [
        tmp_path / name for name in ("baton-demo-1-abc", "baton-decode-abc", "baton-decode-1-a")
    ]
    for other in others:
        other.mkdir()
    link = tmp_path / "baton-decode-2-link"
    link.symlink_to(others[0])
    (others[0] / LOCK).touch()
    remove_those_of_the_dead(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, *others, link])
    living.remove()
    assert not living.path.exists()


def test_a_directory_is_its_user_s_alone(tmp_path: Path) -> None:
    made = make_private_dir(tmp_path, "decode")
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.remove()
