"""Chooses the UCX libraries of this process and loads them before the native module needs them.

The module names its libraries without a path, so whatever UCX is in the process first is the one
it uses. UCX in turn finds its transports (InfiniBand, CUDA, CMA) beside its own libraries: choosing
the libraries chooses the transports. The wheel has no InfiniBand; a system UCX usually does.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.environment import without_ucx_hooks
from common.errors import TransportError

# In this order: libuct needs symbols of libucs that are resolved late, and libucp needs both.
LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
SYSTEM_DIRECTORIES = (
    Path("/opt/ucx/lib"),
    Path("/usr/local/lib"),
    Path("/usr/lib64"),
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib"),
)
NVIDIA_DEVICE = Path("/dev/nvidiactl")


class UcxUnavailable(TransportError):
    """No UCX can be loaded as asked."""


@dataclass(frozen=True, slots=True)
class UcxOrigin:
    """Where the UCX of this process comes from."""

    kind: Literal["wheel", "system", "directory", "loaded"]
    directory: Path


def load_ucx(choice: str) -> UcxOrigin:
    """Loads UCX as `choice` says: auto, wheel, system, or a directory that holds libucp.so.0.

    `auto` is the system's UCX if it can drive this machine's RDMA devices, else the wheel. A
    process has one UCX: if some other package has loaded one already, `auto` takes it and any other
    choice must agree with it.
    Raises: UcxUnavailable.
    """
    loaded = loaded_directory()
    if loaded is not None and choice == "auto":
        return UcxOrigin("loaded", loaded)
    origin = choose_origin(choice)
    if loaded is not None and loaded != origin.directory.resolve():
        raise UcxUnavailable(f"ucx={choice}: this process has already loaded UCX from {loaded}")
    if not (has_rdma_device() or NVIDIA_DEVICE.exists()):
        without_ucx_hooks()
    for library in LIBRARIES:
        try:
            ctypes.CDLL(str(origin.directory / library), mode=ctypes.RTLD_LOCAL)
        except OSError as exc:
            raise UcxUnavailable(f"ucx={choice}: {exc}") from exc
    return origin


def choose_origin(choice: str) -> UcxOrigin:
    """The libraries that `choice` means on this machine. Raises: UcxUnavailable."""
    match choice:
        case "auto":
            system = system_directory()
            if system is not None and has_infiniband(system) and has_rdma_device():
                return UcxOrigin("system", system)
            return UcxOrigin("wheel", wheel_directory())
        case "wheel":
            return UcxOrigin("wheel", wheel_directory())
        case "system":
            system = system_directory()
            if system is None:
                allowed = ", ".join(str(directory) for directory in SYSTEM_DIRECTORIES)
                raise UcxUnavailable(f"ucx=system: no libucp.so.0 in {allowed}")
            return UcxOrigin("system", system)
        case _ if choice.startswith("/"):
            return UcxOrigin("directory", Path(choice))
        case _:
            raise UcxUnavailable(f"ucx={choice}: must be auto, wheel, system or a directory")


def wheel_directory() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise UcxUnavailable("the libucx wheel is not installed: pip install libucx-cu12")
    return Path(spec.submodule_search_locations[0]) / "lib"


def system_directory() -> Path | None:
    present = (path for path in SYSTEM_DIRECTORIES if (path / "libucp.so.0").exists())
    return next(present, None)


def has_infiniband(directory: Path) -> bool:
    return any((directory / "ucx").glob("libuct_ib.so*"))


def has_rdma_device() -> bool:
    return any(Path("/dev/infiniband").glob("uverbs*"))


def loaded_directory() -> Path | None:
    """Directory of the libucp that this process has mapped, if any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libucp.so"):
            return Path(path[0]).resolve().parent
    return None
