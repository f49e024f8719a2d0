"""What pages say of installing leaves a checkout that works, as an editable install or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = "from common.transport.ucx import UcxTransport; import common; \
UcxTransport(); from baton_native import _ucx; print(_ucx.__file__); print(common.__file__)"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would clone, with an environment that borrows the libraries of this one."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    return checkout


@pytest.mark.soak
def test_a_plain_install_of_an_extra_leaves_a_checkout_that_starts(checkout: Path) -> None:
    """`pip install '.[deploy]'` copies our packages beside those of the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", ".venv", cwd=checkout)
    python = checkout / ".venv/bin/python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                   cwd=checkout).strip())  # fmt: skip
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"),
        *("--no-build-isolation", "--disable-pip-version-check", ".[deploy]"),
        cwd=checkout,
        SKBUILD_CMAKE_BUILD_TYPE="Debug",  # half as long
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    native, package = run(python, "-c", CHECK, cwd=checkout).splitlines()
    assert Path(native).parent == own / "baton_native"
    assert Path(package) == checkout / "common/__init__.py"
    assert "--bootstrap-port" in run(python, "-m", "prefill_server", "--help", cwd=checkout)
