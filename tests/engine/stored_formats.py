"""Weights as quantised checkpoints store them, written element by element from the formats' texts.

Sources: AutoAWQ's gemm packing, GPTQModel's packing, compressed-tensors' compressors, and the fp8
configurations of transformers. Slow on purpose; shares nothing with what reads them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_checkpoints import edit_config

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors by what stands behind the layer's name, and fp32 of what they mean."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each place of a word."""


@dataclass(frozen=True)
class StoredFormat:
    """quantization: as config.json has it. store: how one weight of fp32 is written."""

    quantization: dict[str, object]
    store: Callable[[Tensor], Stored]


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32[rows, words] of integers [rows, n], several to a word along the rows."""
    count = 32 // bits
    order = order or tuple(range(count))
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // count), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, element in enumerate(order):
            if word * count + element < codes.shape[1]:
                words[:, word] |= codes[:, word * count + element].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass(frozen=True)
class Grid:
    """codes [rows, columns] in 0..2^bits - 1, scales and zeros [rows, groups], a group for each
    column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def meant(self) -> Tensor:
        zeros = self.zeros.float()[:, self.groups]
        return (self.codes.float() - zeros) * self.scales.float()[:, self.groups]


def round_to_grid(
    values: Tensor,
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool,
    dtype: torch.dtype = torch.float16,
    groups: Tensor | None = None,
) -> Grid:
    """The nearest values on a grid by groups. groups: of each column, if not neighbours'."""
    columns = values.shape[1]
    if groups is None:
        groups = torch.arange(columns) // (group_size or columns)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    scales = torch.empty(len(values), int(groups.max()) + 1, dtype=dtype)
    zeros = torch.full(scales.shape, middle, dtype=torch.int64)
    for group in range(scales.shape[1]):
        part = values[:, groups == group]
        if is_symmetric:
            scales[:, group] = part.abs().amax(1) / (middle - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(0, top).long()
    codes = (values / scales.float()[:, groups]).round().long() + zeros[:, groups]
    return Grid(codes.clamp(0, top), scales, zeros, groups)


def store_awq(values: Tensor) -> Stored:
    grid = round_to_grid(values, 4, 32, is_symmetric=False)
    stored = {
        "qweight": pack(grid.codes.t(), 4, AWQ_ORDER),
        "qzeros": pack(grid.zeros.t(), 4, AWQ_ORDER),
        "scales": grid.scales.t().contiguous(),
    }
    return stored, grid.meant


def store_gptq(
    bits: int, *, is_symmetric: bool = True, by_activation: bool = False, subtracted: int = 1
) -> Callable[[Tensor], Stored]:
    def store(values: Tensor) -> Stored:
        columns = values.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        groups = order // 32 if by_activation else None
        grid = round_to_grid(values, bits, 32, is_symmetric=is_symmetric, groups=groups)
        zeros = (grid.zeros - subtracted) % (1 << bits)
        stored = {
            "qweight": pack(grid.codes, bits).t().contiguous(),
            "qzeros": pack(zeros.t(), bits),
            "scales": grid.scales.t().contiguous(),
            "g_idx": grid.groups.to(torch.int32),
        }
        return stored, grid.meant

    return store


def store_packed(
    bits: int, group_size: int, *, is_symmetric: bool, by_activation: bool = False
) -> Callable[[Tensor], Stored]:
    def store(values: Tensor) -> Stored:
        columns = values.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        grid = round_to_grid(
            values,
            bits,
            group_size,
            is_symmetric=is_symmetric,
            dtype=torch.bfloat16,
            groups=order // group_size if by_activation else None,
        )
        stored = {
            "weight_packed": pack(grid.codes, bits),
            "weight_scale": grid.scales,
            "weight_shape": torch.tensor(values.shape),
        }
        if not is_symmetric:
            stored["weight_zero_point"] = pack(grid.zeros.t(), bits).t().contiguous()
        if by_activation:
            stored["weight_g_idx"] = grid.groups.to(torch.int32)
        return stored, grid.meant

    return store


def store_bytes(values: Tensor) -> Stored:
    grid = round_to_grid(values, 8, 0, is_symmetric=True, dtype=torch.bfloat16)
    stored = {"weight": (grid.codes - 128).to(torch.int8), "weight_scale": grid.scales}
    return stored, grid.meant


def store_bytes_with_zeros(values: Tensor) -> Stored:
    grid = round_to_grid(values, 8, 0, is_symmetric=False, dtype=torch.float32)
    stored = {
        "weight": (grid.codes - 128).to(torch.int8),
        "weight_scale": grid.scales,
        "weight_zero_point": (grid.zeros - 128).to(torch.int8),
    }
    return stored, grid.meant


def store_float8(
    *, by_row: bool, suffix: str = "weight_scale", input_name: str = ""
) -> Callable[[Tensor], Stored]:
    def store(values: Tensor) -> Stored:
        largest = values.abs().amax(1, keepdim=True) if by_row else values.abs().max()
        scales = largest / 448.0
        codes = (values / scales).to(torch.float8_e4m3fn)
        stored = {"weight": codes, suffix: scales}
        if input_name:
            stored[input_name] = torch.tensor(0.1)
        return stored, codes.float() * scales

    return store


def compressed(stored: str, weights: dict[str, object], **group: object) -> dict[str, object]:
    scheme = {"targets": ["Linear"], "weights": weights, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def integers(bits: int, strategy: str, **more: object) -> dict[str, object]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


GROUPS = {"group_size": 32}
AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ: dict[str, object] = {"quant_method": "gptq", "group_size": 32, "sym": True}
FLOAT8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
TOKEN_INPUTS: dict[str, object] = integers(8, "token", dynamic=True)
FORMATS = {
    "fp8 tensor": StoredFormat(
        FLOAT8 | {"activation_scheme": "static"},
        store_float8(by_row=False, input_name="input_scale"),
    ),
    "fp8 tensor, other names": StoredFormat(
        FLOAT8 | {"weight_block_size": None},
        store_float8(by_row=False, suffix="weight_scale_inv", input_name="activation_scale"),
    ),
    "fp8 channel": StoredFormat(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        store_float8(by_row=True),
    ),
    "int8": StoredFormat(
        compressed("int-quantized", integers(8, "channel"), input_activations=TOKEN_INPUTS),
        store_bytes,
    ),
    "int8 with zeros": StoredFormat(
        compressed("int-quantized", integers(8, "channel", symmetric=False)),
        store_bytes_with_zeros,
    ),
    "int4 groups": StoredFormat(
        compressed("pack-quantized", integers(4, "group", **GROUPS)),
        store_packed(4, 32, is_symmetric=True),
    ),
    "int4 groups with zeros": StoredFormat(
        compressed("pack-quantized", integers(4, "group", symmetric=False, **GROUPS)),
        store_packed(4, 32, is_symmetric=False),
    ),
    "int4 groups by activation": StoredFormat(
        compressed("pack-quantized", integers(4, "group", actorder="group", **GROUPS)),
        store_packed(4, 32, is_symmetric=True, by_activation=True),
    ),
    "int4 channel with zeros": StoredFormat(
        compressed("pack-quantized", integers(4, "channel", symmetric=False)),
        store_packed(4, 0, is_symmetric=False),
    ),
    "int8 packed": StoredFormat(
        compressed("pack-quantized", integers(8, "channel")), store_packed(8, 0, is_symmetric=True)
    ),
    "awq": StoredFormat(AWQ | GROUPS, store_awq),
    "gptq": StoredFormat(GPTQ | {"bits": 4, "desc_act": False}, store_gptq(4)),
    "gptq by activation": StoredFormat(
        GPTQ | {"bits": 4, "desc_act": True}, store_gptq(4, by_activation=True)
    ),
    "gptq with zeros": StoredFormat(
        GPTQ | {"bits": 4, "sym": False}, store_gptq(4, is_symmetric=False)
    ),
    "gptq v2": StoredFormat(
        GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
        store_gptq(4, is_symmetric=False, subtracted=0),
    ),
    "gptq of 8 bits": StoredFormat(
        GPTQ | {"bits": 8, "sym": False}, store_gptq(8, is_symmetric=False)
    ),
}


def is_linear(name: str, values: Tensor) -> bool:
    return name.endswith("_proj.weight") and values.dim() == 2


def write_twins(
    plain: Path,
    directory: Path,
    stored_format: StoredFormat,
    is_stored: Callable[[str, Tensor], bool] = is_linear,
) -> tuple[Path, Path]:
    """(a quantised checkpoint, one of fp32 with what it means) from one that stays as it is."""
    quantised, meant = (Path(shutil.copytree(plain, directory / n)) for n in ("stored", "meant"))
    tensors = load_file(plain / "model.safetensors")
    written: dict[str, Tensor] = {}
    for name, values in split_experts(tensors).items():
        tensors[name] = values
        written[name] = values
        if is_stored(name, values):
            parts, tensors[name] = stored_format.store(values)
            del written[name]
            written |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    tensors = {name: value for name, value in tensors.items() if not is_stack(name)}
    assert len(written) > len(tensors) > 10
    save_file(tensors, meant / "model.safetensors")
    save_file({n: v.contiguous() for n, v in written.items()}, quantised / "model.safetensors")
    edit_config(quantised, quantization_config=stored_format.quantization)
    return quantised, meant


def is_stack(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts as a tensor for each, as quantised checkpoints have them."""
    split: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if not is_stack(name):
            split[name] = values
            continue
        layer, _, part = name.rpartition(".")
        for expert, weight in enumerate(values):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for one, rows in zip(names, weight.chunk(len(names)), strict=True):
                split[f"{layer}.{expert}.{one}.weight"] = rows.contiguous()
    return split
