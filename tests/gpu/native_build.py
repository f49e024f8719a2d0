"""Builds the native modules in place if one is missing or older than its sources.

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


MODULES = ("_ucx", "_stream", "_copies")


def module_paths() -> list[Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [ROOT / "baton_native" / f"{name}{suffix}" for name in MODULES]


def build_native() -> str:
    """What was done, in words. Raises: CalledProcessError; the compiler's words are on stderr."""
    modules = module_paths()
    newest = max(path.stat().st_mtime for path in SOURCES.rglob("*"))
    if all(module.exists() and module.stat().st_mtime >= newest for module in modules):
        return "the native modules are there"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", SOURCES, "-B", BUILD, *generator, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", BUILD, "--parallel"],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    for module in modules:
        # A process that has the old module mapped keeps it.
        module.parent.mkdir(exist_ok=True)
        fresh = module.with_suffix(".new")
        shutil.copy2(BUILD / module.name, fresh)
        os.replace(fresh, module)
    return "built the native modules"
