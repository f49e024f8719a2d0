"""Mutated frames against the port of a stream, and what a slow reader of the format makes of them.

`python -m tests.transport.stream_fuzz --cases 1000000`. Each case is one connection: frames that
are right, bytes of them changed, cut or grown. What the target stores must be exactly what the
reader below stores, memory beside its regions included.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import sys
from contextlib import suppress

import numpy as np

from common.transport.stream import StreamAddress, StreamSettings, StreamTransport
from common.transport.stream import parse_stream_address as parse

HELLO_MAGIC, FRAME_MAGIC = 0x31302D4E4F544142, 0x4D415246
HEAD, RUN, ACK = struct.Struct("<IIQQ"), struct.Struct("<IIQ"), struct.Struct("<Q")
RUN_COUNT_MAX, FRAME_NBYTES_MAX = 512, 2 << 20
REGION_NBYTES = (4096, 100)
GUARD_NBYTES = 4096
EXTREMES = (0, 1, 2, 100, 4096, 4097, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
PATIENCE_S = 20.0


class World:
    """A target of two regions, each between guards, and a third one that it does not open."""

    def __init__(self, *, is_encrypted: bool = False) -> None:
        self.transport = StreamTransport(StreamSettings(is_encrypted=is_encrypted))
        self.memory: list[np.ndarray] = []
        for index, nbytes in enumerate((*REGION_NBYTES, 4096)):
            memory = np.zeros(nbytes + 2 * GUARD_NBYTES, np.uint8)
            start = memory.ctypes.data + GUARD_NBYTES
            self.transport.register(f"region{index}", start, nbytes, "host")
            self.memory.append(memory)
        self.descriptor = self.transport.open_target("writer", ["region0", "region1"])
        self.address: StreamAddress = parse(self.descriptor.stream_address)

    def hello(self) -> bytes:
        return struct.pack("<Q", HELLO_MAGIC) + self.address.target + self.address.secret

    def ask(self, data: bytes) -> list[int]:
        """Send the bytes and nothing more; the acknowledged sequence numbers."""
        heard = bytearray()
        with socket.create_connection((self.address.host, self.address.port)) as connection:
            connection.settimeout(PATIENCE_S)
            with suppress(OSError):  # it may hang up while we still send
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while more := connection.recv(1 << 16):
                    heard += more
        whole = len(heard) - len(heard) % ACK.size
        return [sequence for (sequence,) in ACK.iter_unpack(bytes(heard[:whole]))]

    def regions(self) -> list[np.ndarray]:
        return [memory[GUARD_NBYTES:-GUARD_NBYTES] for memory in self.memory]

    def close(self) -> None:
        self.transport.close()


def frame(rng: random.Random, sequence: int) -> bytes:
    """One that is right."""
    runs = []
    for _ in range(rng.choice((1, 1, 2, 7, 40))):
        region = rng.randrange(2)
        nbytes = rng.randint(1, min(64, REGION_NBYTES[region]))
        runs.append((region, nbytes, rng.randint(0, REGION_NBYTES[region] - nbytes)))
    total = sum(nbytes for _, nbytes, _ in runs)
    table = b"".join(RUN.pack(*run) for run in runs)
    head = HEAD.pack(FRAME_MAGIC, len(runs), total, sequence)
    return head + table + rng.randbytes(total)


def mutate(rng: random.Random, data: bytearray) -> None:
    """Change a few bytes, a whole field, or the length."""
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0 if data:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                struct_of = rng.choice(("<I", "<Q"))
                limit = 2 ** (8 * struct.calcsize(struct_of)) - 1
                value = min(rng.choice(EXTREMES), limit)
                field = struct.pack(struct_of, value)
                aligned = place // 4 * 4
                data[aligned : aligned + len(field)] = field
            case 2:
                del data[place:]
            case 3:
                del data[place : place + rng.randint(1, 32)]
            case _:
                data[place:place] = rng.randbytes(rng.randint(1, 32))


def store(data: bytes, regions: list[np.ndarray]) -> int:
    """The slow reader: stores what is right, in order, up to the first thing that is not; how many
    frames are whole."""
    at, count = 0, 0
    while True:
        head = data[at : at + HEAD.size]
        if len(head) < HEAD.size:
            return count
        magic, run_count, total, sequence = HEAD.unpack(head)
        at += HEAD.size
        if (magic, sequence) != (FRAME_MAGIC, count + 1) or not 1 <= run_count <= RUN_COUNT_MAX:
            return count
        table = data[at : at + run_count * RUN.size]
        at += len(table)
        if total > FRAME_NBYTES_MAX or len(table) < run_count * RUN.size:
            return count
        runs = list(RUN.iter_unpack(table))
        for region, nbytes, offset in runs:
            if region > 1 or not nbytes or offset + nbytes > REGION_NBYTES[region]:
                return count
        if sum(nbytes for _, nbytes, _ in runs) != total:
            return count
        for region, nbytes, offset in runs:
            piece = data[at : at + nbytes]
            regions[region][offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
            if len(piece) < nbytes:
                return count
        count += 1


def try_case(world: World, seed: int) -> None:
    """Raises: AssertionError if the target stored, or acknowledged, anything else."""
    rng = random.Random(seed)
    frames = bytearray(b"".join(frame(rng, index + 1) for index in range(rng.randint(1, 3))))
    mutate(rng, frames)
    hello = bytearray(world.hello())
    is_known = rng.random() < 0.9
    if not is_known:
        hello[rng.randrange(len(hello))] ^= 1 << rng.randrange(8)
    expected = [region.copy() for region in world.regions()]
    count = store(bytes(frames), expected) if is_known else 0
    acks = world.ask(bytes(hello + frames))
    # What it hangs up on with bytes unread may take its last answers along.
    assert acks == list(range(len(acks))) and len(acks) <= count + is_known, f"seed {seed}"
    wait_idle(world)
    for found, wanted in zip(world.regions(), expected, strict=True):
        assert np.array_equal(found, wanted), f"seed {seed}: other bytes were stored"
    for memory in world.memory:
        assert not memory[:GUARD_NBYTES].any() and not memory[-GUARD_NBYTES:].any(), f"seed {seed}"


def wait_idle(world: World) -> None:
    """Until no connection is served any more."""
    while world.transport.incoming_counts() != (0, 0):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    world = World()
    for seed in range(options.first, options.first + options.cases):
        try_case(world, seed)
        if seed % 10_000 == 9_999:
            print(f"{seed + 1} cases", flush=True)
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
