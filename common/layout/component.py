"""The cache of a family as data: which tensors, how they grow, how they are cut.

Knows nothing of ranks, pages or memory. An *item* is one row along a component's growing axis (a
token, a compressed block, a tail row, or the single item of a slot); a *unit* is the only thing
tensor parallelism may cut (a KV head, a state head, a convolution's head-channels); the payload of
one unit of one item is contiguous and never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

DTYPE_NBYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}
"""Element types of a cache; a power of two each, so that the largest aligns all."""


class LiveKind(StrEnum):
    """Which items a request of N tokens needs to go on decoding."""

    FULL = "full"
    WINDOW = "window"
    BLOCK = "block"
    TAIL = "tail"
    SLOT = "slot"


STREAMABLE = (LiveKind.FULL, LiveKind.BLOCK)
PAGED = (LiveKind.FULL, LiveKind.WINDOW, LiveKind.BLOCK)


@dataclass(frozen=True, slots=True)
class Live:
    """The live rule of a component.

    size: window width W in tokens (a query sees keys with 0 <= q - k < W), or the compression
        ratio r of a block or tail. 0 for full and slot.
    back: closed rows that a tail keeps before its open block. 0 for the others.
    """

    kind: LiveKind
    size: int = 0
    back: int = 0

    def items(self, token_count: int) -> range:
        """Absolute indices of the items that are live after `token_count` tokens."""
        match self.kind:
            case LiveKind.FULL:
                return range(token_count)
            case LiveKind.WINDOW:
                return range(max(0, token_count - self.size + 1), token_count)
            case LiveKind.BLOCK:
                return range(token_count // self.size)
            case LiveKind.TAIL:
                open_start = token_count // self.size * self.size
                return range(max(0, open_start - self.back), token_count)
            case LiveKind.SLOT:
                return range(1)
            case _:
                assert_never(self.kind)

    @property
    def is_streamable(self) -> bool:
        """Whether items are final as soon as they are computed, so that they may leave early."""
        return self.kind in STREAMABLE

    @property
    def is_paged(self) -> bool:
        """Whether items are spread over pages; a slot or a tail owns exactly one page."""
        return self.kind in PAGED


FULL = Live(LiveKind.FULL)
SLOT = Live(LiveKind.SLOT)


class Shard(StrEnum):
    """How tensor parallelism spreads the units."""

    SPLIT = "split"
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Segment:
    """Units cut together: `unit_count` in the whole model, `unit_nbytes` per unit and item."""

    name: str
    unit_count: int
    unit_nbytes: int


@dataclass(frozen=True, slots=True)
class CacheComponent:
    """One cached tensor of a family, over all layers that own one.

    layers: global ids of the layers that own it, ascending.
    segments: parts of an item that are cut each on its own (a convolution's q | k | v).
    dtype: element type as torch spells it ("bfloat16").
    order: tag of conventions the bytes depend on ("", "KV", "VK", "rope-half"); equal on both
        sides or refused.
    """

    name: str
    layers: tuple[int, ...]
    segments: tuple[Segment, ...]
    live: Live
    shard: Shard
    dtype: str
    order: str = ""

    @property
    def element_nbytes(self) -> int:
        return DTYPE_NBYTES[self.dtype]
