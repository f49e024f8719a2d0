"""Builds the native part in place if it is missing for this interpreter or older than its sources.

For machines where nothing can be installed; elsewhere `make setup` has done it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "common" / "transport" / "native"
BUILD = ROOT / "build" / "gpu-check"


def module_path() -> Path:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return ROOT / "baton_native" / f"_ucx{suffix}"


def build_native() -> str:
    """What was done, in words. Raises: CalledProcessError; the compiler's words are on stderr."""
    module = module_path()
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir() if path.is_file())
    if module.exists() and module.stat().st_mtime >= newest:
        return f"{module.name} is there"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", SOURCES, "-B", BUILD, *generator, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", BUILD, "--parallel"],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    # A process that has the old module mapped keeps it.
    module.parent.mkdir(exist_ok=True)
    fresh = module.with_suffix(".new")
    shutil.copy2(BUILD / module.name, fresh)
    os.replace(fresh, module)
    return f"built {module.name}"
