"""Where and when something was measured: figures of two machines are not the same figures."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
UCX_WHEELS = ("libucx-cu12", "libucx-cu13")


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_gib: all there is. cores: those that this process may use. ucx: of the wheel."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    ucx: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, Python {self.python}, "
            f"torch {self.torch}, UCX {self.ucx}"
        )


def describe_machine() -> Machine:
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ucx = [f"{found} ({name})" for name in UCX_WHEELS if (found := version_of(name))]
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()) or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_nbytes / (1 << 30), 1),
        python=platform.python_version(),
        torch=version_of("torch") or "not installed",
        ucx=" and ".join(ucx) or "not from a wheel",
    )


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_model(cpuinfo: str) -> str:
    """Of /proc/cpuinfo's text; empty where it names none, as on some ARM machines."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def describe_commit(directory: Path = ROOT) -> str | None:
    """The checkout's commit, "+" behind it if files differ from it. None where git can't say."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()
