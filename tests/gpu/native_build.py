"""Builds the native parts in place if one is missing for this interpreter or older than sources.

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
COMMON = ROOT / "common"
PARTS = {
    COMMON / "transport" / "native": "_ucx",
    COMMON / "engine" / "native": "_kernels",
}
"""Sources, and the module that is made of them and lies beside their folder."""
BUILD = ROOT / "build" / "gpu-check"


def module_path(sources: Path) -> Path:
    return sources.parent / f"{PARTS[sources]}{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_fresh(sources: Path) -> bool:
    module = module_path(sources)
    newest = max(path.stat().st_mtime for path in sources.iterdir())
    return module.exists() and module.stat().st_mtime >= newest


def build_native() -> str:
    """What was done, in words. Raises: CalledProcessError; the compiler's words are on stderr."""
    names = ", ".join(module_path(sources).name for sources in PARTS)
    if all(is_fresh(sources) for sources in PARTS):
        return f"{names} are there"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", COMMON, "-B", BUILD, *generator, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", BUILD, "--parallel"],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    for sources in PARTS:
        # A process that has the old module mapped keeps it.
        module = module_path(sources)
        fresh = module.with_suffix(".new")
        shutil.copy2(BUILD / sources.relative_to(COMMON) / module.name, fresh)
        os.replace(fresh, module)
    return f"built {names}"
