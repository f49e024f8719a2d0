"""The kernel libraries of a GPU server, on any machine: where they are, and checks run with them.

They lie beside the environment, so that nothing else finds them: transformers binds fla's kernels
where it can import them. What they compile for a card is stood in for (`compiled_flashinfer.py`,
`interpreted_triton.py`); all else of them is the package itself. Checks run in a process of their
own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "kernel-packages"
TIMEOUT_S = 600.0

needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason=f"needs {PACKAGES}, which `make setup` fills"
)

Check = Callable[[], None]


def run_checks(module: str, **environment: str) -> dict[str, str]:
    """Traceback by name of each check that a module's `CHECKS` has, "" if it held."""
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as directory:
        report = Path(directory) / "report.json"
        full_environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(PACKAGES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            # Generated sources go here, for the card that servers are measured on.
            "FLASHINFER_WORKSPACE_BASE": directory,
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            # Decorators that would compile need the whole of Triton.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-m", f"tests.kernel_packages.{module}", str(report)],
            cwd=ROOT,
            env=full_environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, str] = json.loads(report.read_text())
        return found


def report_checks(checks: Mapping[str, Check]) -> None:
    """In the process of the checks: runs them all and leaves what was found in the file named."""
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except Exception:  # noqa: BLE001 - whatever broke is the finding
            found[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found))
