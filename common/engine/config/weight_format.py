"""How a checkpoint stores quantised weights, as its config.json says. Knows nothing of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.engine.config.json_fields import JsonFields

FLOAT8_BLOCK_DIMS = 2


class WeightMethod(StrEnum):
    """`quant_method` of the formats that are read."""

    FLOAT8 = "fp8"
    FLOAT4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class Float4Groups:
    """4-bit floats, of which `size` neighbours in a row share a power of two."""

    size: int = 32


@dataclass(frozen=True, slots=True)
class Float8Blocks:
    """float8, of which each block of `rows` x `columns` shares a factor.

    float4: how tensors of packed 4-bit floats among them are stored; None if there may be none.
    """

    rows: int
    columns: int
    float4: Float4Groups | None = None


WeightFormat = Float8Blocks | Float4Groups


def read_weight_format(
    fields: JsonFields, methods: tuple[WeightMethod, ...]
) -> WeightFormat | None:
    """The format of the quantised weights; None if there are none.

    methods: that checkpoints of this architecture come in.
    Raises: ConfigError for any other kind of quantised weights.
    """
    quantization = fields.object("quantization_config")
    if quantization is None:
        return None
    method = quantization.text("quant_method", "")
    if method not in methods:
        allowed = " or ".join(f'"{known}"' for known in methods)
        raise quantization.error(
            "quant_method", f"{allowed}: other quantised weights are not supported"
        )
    if method == WeightMethod.FLOAT4:
        return Float4Groups()
    if quantization.text("fmt", "e4m3") != "e4m3":
        raise quantization.error("fmt", '"e4m3"')
    blocks = quantization.integers("weight_block_size", minimum=1)
    if len(blocks) != FLOAT8_BLOCK_DIMS:
        raise quantization.error("weight_block_size", "two integers, [rows, columns] of a block")
    return Float8Blocks(blocks[0], blocks[1])
