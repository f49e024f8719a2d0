"""`python -m tests.faults.slow_link`: a wire between network namespaces, with delay and loss.

Every namespace gets a tun device; what one of them sends is read here and written to another's.
Between the first, the observer's, and the others nothing is lost or late. Standard input has a
command a line, `cut` or `heal`, and its end is ours. Knows nothing of servers.

The kernel's netem does the same, where it is built in, but drops other packets in every run.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
DEVICE = "baton0"
NETWORK = "10.213.0"  # of our own namespaces only
PACKET_NBYTES_MAX = 65536
# As a router's queue; a sender learns from what is dropped beyond.
QUEUED_COUNT_MAX = 2000
READ_COUNT_MAX = 64  # packets of one device, before the others have their turn
READY = "ready"

_libc = ctypes.CDLL(None, use_errno=True)


def address_of(index: int) -> str:
    """The address in the namespace of that index."""
    return f"{NETWORK}.{index + 1}"


class Link:
    """devices: file descriptors by index, the observer's first."""

    def __init__(self, devices: list[int], delay_s: float, loss: float, seed: int) -> None:
        self._devices = devices
        self._delay_s = delay_s
        self._loss = loss
        self._rng = random.Random(f"link {seed}")
        self._late: deque[tuple[float, int, bytes]] = deque()
        self._is_cut = False

    def run(self, commands: int) -> None:
        """Until the file `commands` ends."""
        poll = select.poll()
        for fd in (commands, *self._devices):
            poll.register(fd, select.POLLIN)
        while True:
            wait_ms = 1000.0
            if self._late:
                wait_ms = max(0.0, (self._late[0][0] - time.monotonic()) * 1000)
            for fd, _ in poll.poll(wait_ms):
                if fd != commands:
                    self._read(fd)
                elif not self._obey(os.read(commands, 256).decode()):
                    return
            self._deliver()

    def _obey(self, text: str) -> bool:
        for word in text.split():
            self._is_cut = word == "cut"
        return bool(text)

    def _read(self, source: int) -> None:
        for _ in range(READ_COUNT_MAX):
            try:
                packet = os.read(source, PACKET_NBYTES_MAX)
            except BlockingIOError:
                return
            index = packet[19] - 1  # the last byte of an IPv4 packet's destination
            if packet[0] >> 4 != 4 or not 0 <= index < len(self._devices):
                continue
            target = self._devices[index]
            if self._devices[0] in (source, target):
                _write(target, packet)
            elif self._passes():
                self._late.append((time.monotonic() + self._delay_s, target, packet))

    def _passes(self) -> bool:
        is_lost = self._rng.random() < self._loss
        return not (is_lost or self._is_cut) and len(self._late) < QUEUED_COUNT_MAX

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, target, packet = self._late.popleft()
            if not self._is_cut:
                _write(target, packet)


def _write(device: int, packet: bytes) -> None:
    """What a full device does not take is lost, as on any wire."""
    try:
        os.write(device, packet)
    except OSError:
        return


def open_device(namespace: Path, index: int) -> int:
    """A tun device in a network namespace, with its address; leaves this thread there."""
    with namespace.open() as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace} can't be entered")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(device, TUNSETIFF, request)
    for words in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{address_of(index)}/24", "dev", DEVICE),
        ("link", "set", DEVICE, "up"),
    ):
        subprocess.run(["ip", *words], check=True)
    return device


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.slow_link", description=__doc__)
    parser.add_argument("namespaces", nargs="+", type=Path, help="files, the observer's first")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    devices = [open_device(path, index) for index, path in enumerate(options.namespaces)]
    print(READY, flush=True)
    Link(devices, options.delay_ms / 1000, options.loss, options.seed).run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
