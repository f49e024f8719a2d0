"""What a test does to a process that runs the real UCX: a driver without a card, calls that fail.

native_stubs/ has the sources, which the system's compiler builds. A process that is started with
the `environment` of a `Driver` finds it as libcuda.so.1; one with that of `Faults` has calls of the
system and of UCX answered by errors, once the test says so.
"""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Sequence
from pathlib import Path

from common.transport.loader import wheel_directory

SOURCES = Path(__file__).parent / "native_stubs"
LIBRARIES = ("libcuda", "libnvidia-ml", "libfaults")
INT_NBYTES = 4

ILLEGAL_ADDRESS = 700
"""What every call of a CUDA context returns once a kernel has faulted."""

UCX_IO_ERROR = -3


def build(directory: Path) -> None:
    """Compile the libraries into a directory."""
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    headers = ["-isystem", wheel_directory().parent / "include"]
    for name in LIBRARIES:
        soname = f"{name}.so.1"
        files = ["-o", directory / soname, SOURCES / f"{name}.c"]
        links = [f"-Wl,-soname,{soname}", "-lpthread", "-ldl"]
        subprocess.run(["cc", *flags, *headers, *files, *links], check=True)


class Control:
    """Numbers that a test and one library of another process share, in the library's order."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._starts = {name: index * INT_NBYTES for index, name in enumerate(names)}

    def set(self, name: str, value: int) -> None:
        start = self._starts[name]
        self._shared[start : start + INT_NBYTES] = value.to_bytes(INT_NBYTES, "little", signed=True)

    def reset(self) -> None:
        self._shared[: len(self._starts) * INT_NBYTES] = bytes(len(self._starts) * INT_NBYTES)

    def get(self, name: str) -> int:
        start = self._starts[name]
        return int.from_bytes(self._shared[start : start + INT_NBYTES], "little", signed=True)


class Driver(Control):
    """The CUDA driver of one process. hold: 1 makes its copies stand still. Names of calls take the
    error that those return; counts say what has happened."""

    def __init__(self, libraries: Path, control: Path) -> None:
        names = ("hold", "event_query", "event_record", "add_callback", "memcpy_async")
        counts = ("asked_count", "copy_count", "handle_count", "set_device_count")
        super().__init__(control, (*names, "open_handle", "synchronize", *counts))
        self.environment = {
            "LD_LIBRARY_PATH": str(libraries),
            "STUB_CUDA_CONTROL": str(control),
        }


class Faults(Control):
    """Calls that fail in one process: its progress thread's epoll_wait with an errno, a flush at
    once or later with a status of UCX."""

    def __init__(self, libraries: Path, control: Path) -> None:
        super().__init__(control, ("epoll_wait", "flush", "late_flush"))
        self.environment = {
            "LD_PRELOAD": str(libraries / "libfaults.so.1"),
            "FAULTS_CONTROL": str(control),
        }
