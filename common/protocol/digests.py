"""What a scheduler asks of its workers to verify a transfer. Values only."""

from __future__ import annotations

import msgspec

from common.config import Verify


class Digest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Digest what a transfer carries, as it lies in this rank's pages; answered by Digested.

    Nothing writes these pages until then. is_source: whether they are the pages that it was sent
    from; layout: the other side's ServerLayout, msgpack. token_count, pages: as in `Send`.
    """

    transfer_id: int
    layout: bytes
    is_source: bool
    token_count: int
    pages: list[tuple[int, list[int]]]
    verify: Verify


class Digested(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """digests: int64[plane][bucket], little-endian, of what this source rank wrote to every target
    rank, zeros where it writes nothing; of a target rank, its own alone."""

    transfer_id: int
    rank: int
    digests: list[bytes]
