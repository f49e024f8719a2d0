"""Machine and commit of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
UCX_WHEELS = ("libucx-cu12", "libucx-cu13")
# The widest first, with the kernel's word for them.
VECTORS = {"AVX-512 BF16": "avx512_bf16", "AVX-512": "avx512f", "AVX2": "avx2"}


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_gib: all there is. cores: those that this process may use. ucx: of the wheel.

    card: the first GPU, driver: its; both empty without one. flashinfer: empty if it is not there.
    """

    cpu: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    ucx: str
    card: str = ""
    driver: str = ""
    flashinfer: str = ""

    def __str__(self) -> str:
        software = (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, Python {self.python}, "
            f"torch {self.torch}, UCX {self.ucx}"
        )
        flashinfer = self.flashinfer or "not installed"
        on_card = f"{self.card}, driver {self.driver}, FlashInfer {flashinfer}"
        return f"{on_card}; {software}" if self.card else software


def describe_machine() -> Machine:
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ucx = [f"{found} ({name})" for name in UCX_WHEELS if (found := version_of(name))]
    card, driver = card_of(ask_driver())
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()) or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_nbytes / (1 << 30), 1),
        python=platform.python_version(),
        torch=version_of("torch") or "not installed",
        ucx=" and ".join(ucx) or "not from a wheel",
        card=card,
        driver=driver,
        flashinfer=version_of("flashinfer-python"),
    )


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_model(cpuinfo: str) -> str:
    """Of /proc/cpuinfo's text, with the widest vectors that it has: machines of one name may differ
    in them. Empty where it names none, as on some ARM machines."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    vectors = [name for name, flag in VECTORS.items() if flag in flags]
    return " ".join([fields.get("model name", ""), *vectors[:1]]).strip()


def ask_driver() -> str:
    """The GPUs as the driver's own tool lists them; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def card_of(listing: str) -> tuple[str, str]:
    """(name, driver) of the first GPU, from what `ask_driver` returns."""
    for line in listing.splitlines():
        name, _, driver = line.rpartition(",")
        return name.strip(), driver.strip()
    return "", ""


def describe_commit(directory: Path = ROOT) -> str | None:
    """The checkout's commit, "+" behind it if files differ from it. None where git can't say."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
