"""The transports under the compiler's sanitizers: `python -m tests.transport.sanitized`, in
`make faults`.

Builds the native modules with AddressSanitizer and UndefinedBehaviorSanitizer, then runs the tests
of the transports and a fuzz of the streams' port with them, children included. Any report ends a
process. UCX itself is as its wheel has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from common.transport.loader import wheel_directory

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitized"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
MODULES = ("_ucx", "_stream", "_copies")
SELECTED = "not cuda and not failures and not memory_does_not_grow"
"""Without what stands in for libraries under UCX; AddressSanitizer keeps freed memory a while."""

PROBE = "from baton_native import _copies, _stream; print(_copies.__file__, _stream.__file__)"

# Every Python that is started with BUILD on its path finds this module there first.
SITE = """
import importlib.machinery, importlib.util, sys
class Sanitized:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in {modules!r}:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, {modules!r}[name])
        return importlib.util.spec_from_loader(name, loader)
sys.meta_path.insert(0, Sanitized)
"""


def build() -> dict[str, str]:
    """The environment in which Python uses what was built."""
    configure = ["cmake", "-S", ROOT / "common/transport/native", "-B", BUILD, "-G", "Ninja"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    configure += ["-DCMAKE_BUILD_TYPE=Debug", f"-DBATON_UCX_DIR={wheel_directory().parent}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD], check=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = {f"baton_native.{name}": str(BUILD / f"{name}{suffix}") for name in MODULES}
    (BUILD / "sitecustomize.py").write_text(SITE.format(modules=modules))
    libraries = [
        subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {
        **os.environ,
        "PYTHONPATH": str(BUILD),
        "LD_PRELOAD": " ".join(libraries),
        # What the interpreter itself never frees is no matter here.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="of the fuzz")
    options = parser.parse_args()
    environment = build()
    used = subprocess.check_output([sys.executable, "-c", PROBE], env=environment, text=True)
    assert all(Path(file).parent == BUILD for file in used.split()), used
    tests = ["tests/transport", "-k", SELECTED, "-p", "no:xdist"]
    fuzz = ["tests.transport.stream_fuzz", "--cases", str(options.cases)]
    for command in (["pytest", *tests], fuzz):
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
