"""Norms and rotation of a token's query and key heads in one launch.

FlashInfer has a kernel for each; one for both it has for all heads of a token together, as video
models are normed, and for two shapes of heads. Importing this needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    heads,
    weight,
    angles,
    out,
    token_stride,
    head_stride,
    head_count,
    epsilon,
    head_dim: tl.constexpr,
    rotated_dim: tl.constexpr,
    is_interleaved: tl.constexpr,
    is_offset: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channels = tl.arange(0, head_dim)
    half: tl.constexpr = rotated_dim // 2
    # The other one of each channel's pair, and which angle is theirs.
    if is_interleaved:
        other = channels ^ 1
        is_first = channels % 2 == 0
        pair = channels // 2
    else:
        other = tl.where(channels < half, channels + half, channels - half)
        is_first = channels < half
        pair = channels % half
    is_turned = channels < rotated_dim
    other = tl.where(is_turned, other, channels)
    first = heads + token * token_stride + head * head_stride
    weights = weight + head * head_dim
    x = tl.load(first + channels).to(tl.float32)
    y = tl.load(first + other).to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), head_dim * 1.0) + epsilon))
    x_weight = tl.load(weights + channels).to(tl.float32)
    y_weight = tl.load(weights + other).to(tl.float32)
    if is_offset:
        x_weight += 1.0
        y_weight += 1.0
    x = x * scale * x_weight
    y = y * scale * y_weight
    cos = tl.load(angles + token * rotated_dim + pair, mask=is_turned, other=1.0)
    sin = tl.load(angles + token * rotated_dim + half + pair, mask=is_turned, other=0.0)
    turned = x * cos + tl.where(is_first, -y, y) * sin
    place = out + (token * head_count + head) * head_dim + channels
    tl.store(place, turned.to(out.dtype.element_ty))


def norm_and_rotate(
    heads: Tensor,
    weight: Tensor,
    epsilon: float,
    angles: Tensor,
    *,
    is_interleaved: bool,
    is_offset: bool,
) -> Tensor:
    """[T, heads, head dim], normed over each head's dimension, and then rotated.

    weight: [heads, head dim], an offset from one where `is_offset`. angles: fp32[T, rotated dim],
    the cosines of each token, then its sines. head dim: a power of two.
    """
    token_count, head_count, head_dim = heads.shape
    assert heads.stride(-1) == 1 and weight.is_contiguous() and angles.is_contiguous()
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _norm_and_rotate[(token_count, head_count)](
        heads,
        weight,
        angles,
        out,
        heads.stride(0),
        heads.stride(1),
        head_count,
        epsilon,
        head_dim=head_dim,
        rotated_dim=angles.shape[1],
        is_interleaved=is_interleaved,
        is_offset=is_offset,
        num_warps=1,
    )
    return out
