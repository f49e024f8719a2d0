"""The cache components of every supported family. The only file of the hand-over that names one."""

from __future__ import annotations

from common.layout.component import FULL, CacheComponent, Segment, Shard

DTYPE_NBYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}


def gqa_components(
    *, layer_count: int, kv_head_count: int, head_dim: int, dtype: str
) -> tuple[CacheComponent, ...]:
    """Keys (after norm and rope, half-split pairs) and values of a dense or MoE GQA model."""
    unit_nbytes = head_dim * DTYPE_NBYTES[dtype]
    layers = tuple(range(layer_count))
    return tuple(
        CacheComponent(
            name=name,
            layers=layers,
            segments=(Segment("head", kv_head_count, unit_nbytes),),
            live=FULL,
            shard=Shard.SPLIT,
            dtype=dtype,
            order="rope-half" if name == "k" else "",
        )
        for name in ("k", "v")
    )
