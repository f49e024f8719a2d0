"""Integers of 4 or 8 bits out of the 32-bit words that they are packed into. Knows no files."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts each of eight neighbours, counted from its low end."""


def unpack_words(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """uint8[.., n * 32 / bits] of int32[.., n], the lowest bits of a word first.

    places: where in a word each of its elements lies, if they are not in order.
    """
    # Not contiguous(): one word a row may keep any stride, and be refused as bytes.
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    if places is None:
        return packed
    grouped = packed.view(*packed.shape[:-1], -1, len(places))
    return grouped[..., list(places)].flatten(-2)


def centre(codes: Tensor, bits: int) -> Tensor:
    """int8 of uint8 codes, the middle one of which is 0."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def cut_whole(part: slice, size: int, whole: int) -> tuple[slice, slice]:
    """The runs of `whole` elements that hold some of `size`, and those elements in them.

    A rank's part may begin and end inside a run; whole runs are read and cut.
    """
    start, stop, _ = part.indices(size)
    runs = slice(start // whole, -(-stop // whole))
    first = runs.start * whole
    return runs, slice(start - first, stop - first)
