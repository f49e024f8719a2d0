"""What both sides of a transfer say of it, each rank for itself, as real workers do."""

from __future__ import annotations

from common.config import Verify
from common.planner.digests import Difference, add_digests, digested_planes, find_difference
from common.protocol.codec import encode_layout
from common.protocol.digests import Digest
from common.scheduling.sequence import Sequence
from common.worker.digester import Digester
from tests.families.server import Server

TRANSFER = 0x0123_4567_89AB_CDEF


def digests_sent(source: Server, given: Sequence, target: Server) -> list[bytes]:
    """Per target rank, summed over the source ranks."""
    total: list[bytes] = []
    for digests in _digests(source, given, target, is_source=True):
        total = add_digests(total, digests) if total else digests
    return total


def digests_found(source: Server, target: Server, taken: Sequence) -> list[bytes]:
    """Per target rank, of its own pages."""
    return [own for (own,) in _digests(target, taken, source, is_source=False)]


def _digests(
    server: Server, sequence: Sequence, peer: Server, *, is_source: bool
) -> list[list[bytes]]:
    job = Digest(
        TRANSFER,
        encode_layout(peer.layout),
        is_source,
        sequence.computed_count,
        sequence.page_lists(),
        Verify.FULL,
    )
    return [
        Digester(pool.buffers, rank).run(job).digests
        for rank, pool in zip(server.layout.ranks, server.pools, strict=True)
    ]


def first_difference(
    target: Server, token_count: int, sent: list[bytes], found: list[bytes]
) -> Difference | None:
    for rank, mine, theirs in zip(target.layout.ranks, sent, found, strict=True):
        planes = digested_planes(rank, Verify.FULL, TRANSFER)
        difference = find_difference(rank, planes, token_count, mine, theirs)
        assert not isinstance(difference, str), difference
        if difference is not None:
            return difference
    return None
