"""Weights of float8 whose blocks of rows and columns share a factor, multiplied out while loading.

A rank's slice may begin or end inside a block, and the last block of a row or column may be cut
short; so every element finds its factor by its place in the whole tensor. Knows nothing of files.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_blocks(
    part: Tensor,
    scales: Tensor,
    shape: tuple[int, ...],
    take: tuple[slice, ...],
    blocks: tuple[int, int],
) -> Tensor:
    """fp32 values of `part`, which is the slice `take` of a tensor of `shape`.

    scales: fp32[.., ceil(rows / blocks[0]), ceil(columns / blocks[1])] of the whole tensor, whose
    outer dimensions are the tensor's own.
    """
    scales = scales[take[:-2]]
    for dim, block in zip((-2, -1), blocks, strict=True):
        places = torch.arange(shape[dim])[take[dim]] // block
        scales = scales.index_select(dim, places)
    return part.float() * scales
