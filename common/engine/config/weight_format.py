"""How a checkpoint stores quantised weights, as its config.json says. Knows nothing of tensors.

Source: the configurations of transformers (fp8, mxfp4), AutoAWQ, GPTQModel and compressed-tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from common.engine.config.json_fields import JsonFields

FLOAT8_BLOCK_DIMS = 2


class WeightMethod(StrEnum):
    """`quant_method` of the formats that are read."""

    FLOAT8 = "fp8"
    FLOAT4 = "mxfp4"
    COMPRESSED = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"


METHODS = tuple(method for method in WeightMethod if method != WeightMethod.FLOAT4)
"""Of architectures whose tensors have the names of their layers."""


class Packing(StrEnum):
    """How integers lie in a tensor, and what the tensors of a weight are called."""

    BYTES = "bytes"
    COMPRESSED = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"


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


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """float8, of which each row shares a factor, or the whole tensor.

    rounds_inputs: whether what is multiplied is meant to be rounded to float8 as well.
    """

    rounds_inputs: bool = True


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of `bits`, of which `group_size` neighbours in a row share a factor; 0: the row.

    has_zeros: whether groups have a zero point each. zero_offset: of zero points, to what is
    stored. rounds_inputs: whether what is multiplied is rounded to as many bits, token by token.
    """

    bits: int
    group_size: int
    packing: Packing
    has_zeros: bool = False
    zero_offset: int = 0
    rounds_inputs: bool = False


@dataclass(frozen=True, slots=True)
class MixedFormats:
    """Formats by layer. rules: targets, as compressed-tensors names them, and what they have."""

    rules: tuple[tuple[tuple[str, ...], StoredFormat], ...]


StoredFormat = Float8Blocks | Float4Groups | Float8Rows | Integers
WeightFormat = StoredFormat | MixedFormats

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
LINEAR_CLASS = "Linear"
PATTERN_PREFIX = "re:"


def is_targeted(layer: str, targets: tuple[str, ...]) -> bool:
    """Whether a linear layer, by its name in a checkpoint, is one of a rule's."""
    return any(
        re.match(target.removeprefix(PATTERN_PREFIX), layer) is not None
        if target.startswith(PATTERN_PREFIX)
        else target in (LINEAR_CLASS, layer)
        for target in targets
    )


def read_weight_format(
    fields: JsonFields, methods: tuple[WeightMethod, ...]
) -> WeightFormat | None:
    """The format of the quantised weights; None if there are none. Which weights those are shows
    in the files: layers that are left out are stored plain.

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
    match WeightMethod(method):
        case WeightMethod.FLOAT4:
            return Float4Groups()
        case WeightMethod.FLOAT8:
            return _read_float8(quantization)
        case WeightMethod.COMPRESSED:
            return _read_compressed(quantization)
        case WeightMethod.AWQ:
            return _read_awq(quantization)
        case WeightMethod.GPTQ:
            return _read_gptq(quantization)


def _read_float8(fields: JsonFields) -> StoredFormat:
    if fields.text("fmt", "e4m3") != "e4m3":
        raise fields.error("fmt", '"e4m3"')
    return _read_blocks(fields, "weight_block_size")


def _read_blocks(fields: JsonFields, name: str) -> StoredFormat:
    if not fields.has(name):
        return Float8Rows()
    blocks = fields.integers(name, minimum=1)
    if len(blocks) != FLOAT8_BLOCK_DIMS:
        raise fields.error(name, "two integers, [rows, columns] of a block")
    return Float8Blocks(blocks[0], blocks[1])


def _read_awq(fields: JsonFields) -> StoredFormat:
    if fields.text("version", "gemm").lower() != "gemm":
        raise fields.error("version", '"gemm"')
    if fields.integer("bits", 4) != 4:
        raise fields.error("bits", "4")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "true")
    return Integers(4, _read_group_size(fields), Packing.AWQ, has_zeros=True)


def _read_gptq(fields: JsonFields) -> StoredFormat:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.error("bits", "4 or 8")
    version = fields.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", '"gptq" or "gptq_v2"')
    dynamic = fields.object("dynamic")
    if dynamic is not None and dynamic.values:
        raise fields.error("dynamic", "absent: one format for all layers")
    return Integers(
        bits,
        _read_group_size(fields),
        Packing.GPTQ,
        has_zeros=True,
        zero_offset=1 if version == "gptq" else 0,
    )


def _read_group_size(fields: JsonFields) -> int:
    """0 for -1, which stands for a row."""
    return 0 if fields.values.get("group_size") == -1 else fields.integer("group_size")


def _read_compressed(fields: JsonFields) -> WeightFormat:
    for name in ("sparsity_config", "transform_config"):
        other = fields.object(name)
        if other is not None and other.values and other.text("format", "") != "dense":
            raise fields.error(name, "absent")
    groups = fields.object("config_groups")
    if groups is None or not groups.values:
        raise fields.error("config_groups", "an object of groups of layers")
    rules: list[tuple[tuple[str, ...], StoredFormat]] = []
    for name in groups.values:
        group = groups.object(name)
        if group is None:
            raise groups.error(name, "an object")
        source = group if group.has("format") else fields
        stored = source.text("format", "")
        if stored not in FORMATS:
            allowed = " or ".join(f'"{known}"' for known in FORMATS)
            raise source.error("format", f"{allowed}: other quantised weights are not supported")
        rules.append((group.texts("targets"), _read_scheme(group, stored)))
    if len(rules) == 1 and rules[0][0] == (LINEAR_CLASS,):
        return rules[0][1]
    for targets, _ in rules:
        for target in targets:
            _check_pattern(groups, target)
    return MixedFormats(tuple(rules))


def _check_pattern(fields: JsonFields, target: str) -> None:
    try:
        re.compile(target.removeprefix(PATTERN_PREFIX))
    except re.error as exc:
        raise fields.error(target, f"a regular expression: {exc}") from exc


def _read_scheme(group: JsonFields, stored: str) -> StoredFormat:
    """One of compressed-tensors' groups: `weights`, and `input_activations` if it has them."""
    weights = group.object("weights")
    if weights is None:
        raise group.error("weights", "an object")
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    bits = weights.integer("num_bits")
    if weights.text("type", "int") == "float":
        if bits != 8 or stored == "pack-quantized":
            raise weights.error("num_bits", "8, of floats that are not packed")
        if strategy not in ("tensor", "channel", "block"):
            raise weights.error("strategy", '"tensor", "channel" or "block" of floats')
        if strategy == "block":
            return _read_blocks(weights, "block_structure")
        return Float8Rows(rounds_inputs=group.object("input_activations") is not None)
    is_packed = stored == "pack-quantized"
    if bits not in ((4, 8) if is_packed else (8,)):
        raise weights.error("num_bits", "4 or 8" if is_packed else "8")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.error("strategy", '"tensor", "channel" or "group" of integers')
    inputs = group.object("input_activations")
    return Integers(
        bits,
        weights.integer("group_size") if strategy == "group" else 0,
        Packing.COMPRESSED if is_packed else Packing.BYTES,
        has_zeros=not weights.flag("symmetric", True),
        rounds_inputs=inputs is not None and _rounds_tokens(inputs, bits),
    )


def _rounds_tokens(inputs: JsonFields, bits: int) -> bool:
    """Whether each token's inputs are rounded by a factor of their own, found on the way."""
    return (
        inputs.values.get("dynamic") is True
        and inputs.text("strategy", "") == "token"
        and inputs.text("type", "int") == "int"
        and inputs.integer("num_bits", 8) == bits
        and inputs.flag("symmetric", True)
    )
