"""Mounts and networks of our own, which the kernel takes away when we end; only root can have them.

Knows nothing of what runs there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.slow_link import READY, address_of
from tests.soak.servers import Place

ISOLATED = "--isolated"
SHARED_MEMORY = Path("/dev/shm")
# Several times what a pair takes, and little enough to be filled in a moment.
MEMORY_SIZE = "1g"
DISK_SIZE = "32m"
FILLER = "filler"
FILL_NBYTES = 1 << 20
NAMESPACE_COUNT = 3  # the observer's and two servers'


def run_isolated(module: str, arguments: list[str]) -> None:
    """Start this program anew with mounts and a network of its own; returns if that can't be."""
    namespaces = ["unshare", "--mount", "--net", "--propagation", "private"]
    probe = [*namespaces, "test", "-c", "/dev/net/tun"]
    try:
        can = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can = False
    if can:
        command = [*namespaces, sys.executable, "-m", module, ISOLATED, *arguments]
        os.execvp(command[0], command)


def settle_in() -> None:
    """What a fresh set of namespaces lacks: a loopback, a /sys that shows it, a small /dev/shm."""
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["mount", "-t", "sysfs", "sysfs", "/sys"],
        ["mount", "-t", "tmpfs", "-o", f"size={MEMORY_SIZE}", "tmpfs", str(SHARED_MEMORY)],
    ):
        subprocess.run(command, check=True)


@dataclass(slots=True)
class Disk:
    """A directory, with a small file system of its own if it `is_small`."""

    is_small: bool
    path: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="baton-test-")))

    def __enter__(self) -> Disk:
        if self.is_small:
            options = ["-t", "tmpfs", "-o", f"size={DISK_SIZE}"]
            subprocess.run(["mount", *options, "tmpfs", str(self.path)], check=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """What is in it stays, beyond its file system."""
        if self.is_small:
            kept = Path(tempfile.mkdtemp(prefix="baton-kept-"))
            for path in self.path.glob("*.log"):
                shutil.copy(path, kept)
            # Lazily: somebody may still have a file open.
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)
            for path in kept.iterdir():
                shutil.move(path, self.path)
            kept.rmdir()


def fill(directory: Path) -> None:
    """Until not one byte more fits into its file system."""
    with (directory / FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(FILL_NBYTES))
    with (directory / FILLER).open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0")


def make_room(directory: Path) -> None:
    (directory / FILLER).unlink(missing_ok=True)


class FarHosts:
    """Two hosts, as far as a kernel can pretend, and a slow link between them.

    Each has a network and process ids of its own, so that nobody takes the other for a neighbour.
    """

    def __init__(self, working_directory: Path, seed: int) -> None:
        self._working_directory = working_directory
        self._seed = seed
        self._hosts: list[asyncio.subprocess.Process] = []
        self._link: asyncio.subprocess.Process | None = None
        self.places: list[Place] = []

    async def __aenter__(self) -> FarHosts:
        namespaces = [Path("/proc/self/ns/net")]
        for index in range(1, NAMESPACE_COUNT):
            init = await self._start_host()
            namespaces.append(Path(f"/proc/{init}/ns/net"))
            command = ["nsenter", f"--target={init}", "--net", "--mount", "--pid", "--no-fork"]
            command += [f"--wd={self._working_directory}"]
            self.places.append(Place(address_of(index), tuple(command)))
        self._link = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.faults.slow_link", *map(str, namespaces)),
            *("--seed", str(self._seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=self._working_directory,
        )
        assert self._link.stdout is not None
        said = (await self._link.stdout.readline()).decode().strip()
        assert said == READY, f"the link said {said!r}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for process in (self._link, *self._hosts):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    async def cut(self) -> None:
        await self._tell("cut")

    async def heal(self) -> None:
        await self._tell("heal")

    async def _tell(self, word: str) -> None:
        assert self._link is not None and self._link.stdin is not None
        self._link.stdin.write(f"{word}\n".encode())
        await self._link.stdin.drain()

    async def _start_host(self) -> int:
        """The process id of its first process; with it, all others end."""
        script = f"mount -t sysfs sysfs /sys && echo {READY} && exec sleep infinity"
        host = await asyncio.create_subprocess_exec(
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", script),
            stdout=asyncio.subprocess.PIPE,
        )
        self._hosts.append(host)
        assert host.stdout is not None
        said = (await host.stdout.readline()).decode().strip()
        assert said == READY, f"a host said {said!r}"
        return int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text())
