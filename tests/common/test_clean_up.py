"""What a killed supervisor left behind is removed at the next start, and nothing else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from common.runtime.supervisor import clean_up_after_dead


def test_only_directories_of_dead_supervisors_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [
        f"baton-decode-{ended.pid}-abc_1",
        f"baton-prefill-{os.getpid()}-abc_1",
        f"baton-demo-{ended.pid}-abc_1",
        "baton-decode-abc_1",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / f"baton-decode-{ended.pid}-link").symlink_to(tmp_path / names[1])
    clean_up_after_dead()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*names[1:], f"baton-decode-{ended.pid}-link"])
