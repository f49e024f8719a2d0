"""The wire between pretended hosts, with pipes for devices."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.faults.slow_link import Link

PACKET_COUNT = 200
LAST = 255
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Wire:
    """hosts: our ends of the devices, the observer's first. commands: where it is told to cut."""

    hosts: list[socket.socket]
    commands: int

    def send(self, source: int, target: int, number: int) -> None:
        header = bytes([0x45, *bytes(18), target + 1])
        self.hosts[source].send(header + bytes([number]))

    def receive(self, target: int) -> int:
        return self.hosts[target].recv(64)[-1]


@contextmanager
def lay_wire(loss: float, seed: int = 1) -> Iterator[Wire]:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for ours, theirs in pairs:
        ours.settimeout(TIMEOUT_S)
        theirs.setblocking(False)
    ear, mouth = os.pipe()
    link = Link([theirs.fileno() for _, theirs in pairs], 0.001, loss, seed)
    thread = threading.Thread(target=link.run, args=(ear,))
    thread.start()
    try:
        yield Wire([ours for ours, _ in pairs], mouth)
    finally:
        os.close(mouth)
        thread.join()
        os.close(ear)
        for pair in pairs:
            for one in pair:
                one.close()


def survivors(wire: Wire) -> list[int]:
    """Which of many packets get through from one server to the other."""
    for number in range(PACKET_COUNT):
        wire.send(1, 2, number)
    found: list[int] = []
    # What was sent last is repeated until it comes, to know that nothing else does.
    while not found or found[-1] != LAST:
        wire.send(1, 2, LAST)
        found.append(wire.receive(2))
    return found[:-1]


def test_a_wire_loses_the_same_packets_again_under_the_same_seed_and_keeps_their_order() -> None:
    lost: list[list[int]] = []
    for seed in (1, 1, 2):
        with lay_wire(loss=0.5, seed=seed) as wire:
            got = [number for number in survivors(wire) if number != LAST]
        assert got == sorted(got)
        assert PACKET_COUNT // 4 < len(got) < PACKET_COUNT * 3 // 4
        lost.append(got)
    assert lost[0] == lost[1] != lost[2]


def test_a_cut_wire_carries_nothing_between_servers_and_all_to_the_observer() -> None:
    with lay_wire(loss=0.0) as wire:
        os.write(wire.commands, b"cut\n")
        # Commands come first, so what the observer hears was sent over a wire that is cut.
        wire.send(1, 0, 1)
        assert wire.receive(0) == 1
        wire.send(1, 2, 2)
        wire.send(0, 2, 3)
        assert wire.receive(2) == 3
        os.write(wire.commands, b"heal\n")
        wire.hosts[2].settimeout(0.01)
        while True:
            wire.send(1, 2, 4)
            with suppress(TimeoutError):
                assert wire.receive(2) == 4
                return
