"""Messages between a scheduler and its workers to verify a transfer. Values only."""

from __future__ import annotations

import msgspec

from common.config import Verify


class Digest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Digest the cache of a transfer in this rank's pages; answered by Digested.

    No write touches these pages until then. is_source: whether these are the source pages; layout:
    the other side's ServerLayout, msgpack. token_start, token_count: as in the TransferRequest.
    pages: per page group (first logical page index, page ids) that hold what was transferred; they
    may hold more.
    """

    transfer_id: int
    layout: bytes
    is_source: bool
    token_count: int
    pages: list[tuple[int, list[int]]]
    verify: Verify
    token_start: int = 0


class Digested(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """digests: int64[plane][bucket], little-endian. Of a source rank: of its writes to every
    target rank, zeros where it writes none. Of a target rank: of its own pages."""

    transfer_id: int
    rank: int
    digests: list[bytes]
