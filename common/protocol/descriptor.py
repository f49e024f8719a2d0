"""Addresses and memory keys of one rank, as its server announces them to one peer. Values only."""

from __future__ import annotations

import msgspec


class StagingRing(msgspec.Struct, frozen=True):
    """Slots of a staging buffer that one source rank may write, each once until it is freed.

    ring: random. A peer that names it may have pieces scattered from these slots.
    """

    source_rank: int
    ring: int
    slots: list[int]


class StagingBufferDescriptor(msgspec.Struct, frozen=True):
    """Where staged transfers land on one rank: slot s starts at s * slot_nbytes of the region.

    address: "host:port" that the source ranks dial. region: as those of `RankDescriptor`.
    public_key: of the target's control channel, in hexadecimal; "" if it has no keys.
    """

    address: str
    region: tuple[str, int, int, bytes]
    slot_nbytes: int
    rings: list[StagingRing]
    public_key: str = ""


class RankDescriptor(msgspec.Struct, frozen=True):
    """Addresses of one rank, and its regions, one per page group.

    worker_address: of its UCX, stream_address: of its stream, with a secret; empty where it has
        none.
    regions: (name, base address, nbytes, packed memory key); none if pages are not to be written.
    probe: scratch memory, described likewise, that connecting writes to.
    staging_buffer: where staged transfers arrive; None if nothing may be staged.
    page_counts: per page group, without the scratch page; in place of regions that are not
        announced.
    """

    rank: int
    worker_address: bytes
    regions: list[tuple[str, int, int, bytes]]
    probe: tuple[str, int, int, bytes] = ("", 0, 0, b"")
    staging_buffer: StagingBufferDescriptor | None = None
    page_counts: list[int] = []
    stream_address: bytes = b""
