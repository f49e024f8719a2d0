"""Quantised checkpoints of every format that is read: loaded, they are what they mean."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.checkpoint.files import TensorEntry
from common.engine.checkpoint.fingerprint import model_fingerprint
from common.engine.checkpoint.scaled_tensors import Parts, check_parts, find_format, read_stored
from common.engine.config.json_fields import JsonFields
from common.engine.config.weight_format import METHODS, read_weight_format
from common.engine.distributed import ParallelContext
from common.engine.loader import load_model, read_served_config
from common.engine.models.causal_lm import CausalLm
from common.errors import ConfigError
from tests.engine.stored_formats import (
    FORMATS,
    GPTQ,
    TOKEN_INPUTS,
    StoredFormat,
    compressed,
    integers,
    is_linear,
    store_bytes,
    store_gptq,
    store_packed,
    write_twins,
)
from tests.engine.tiny_checkpoints import edit_config, edit_tensors

Checkpoints = Callable[[str], Path]
DTYPE_NAMES = {
    torch.int32: "I32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
NAME = "model.layers.1.self_attn.o_proj"


def targets(model: CausalLm) -> list[Tensor]:
    return [p.target for weight in model.weights() for p in weight.ways[0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("recipe", ["llama_bias", "qwen3_moe"])
def test_a_quantised_checkpoint_loads_as_what_it_means(
    name: str, recipe: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Ranks of two cut groups of 32: their columns of the MLP are 48, of an expert 16."""
    paths = write_twins(tiny_checkpoint(recipe), tmp_path, FORMATS[name])
    for rank in ((0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (5, 8, 1, 2)):
        stored, meant = (load_model(path, parallel=ParallelContext(*rank)) for path in paths)
        pairs = list(zip(targets(stored), targets(meant), strict=True))
        assert len(pairs) > 10
        assert all(torch.equal(found, expected) for found, expected in pairs), rank


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mistral", "qwen2_yarn", "qwen3", "gemma3", "deepseek_v3"])
def test_other_families_have_such_weights_too(
    recipe: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    paths = write_twins(tiny_checkpoint(recipe), tmp_path, FORMATS["int4 groups with zeros"])
    stored, meant = (load_model(path) for path in paths)
    pairs = zip(targets(stored), targets(meant), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("name", FORMATS)
def test_any_slice_is_that_of_the_whole_weight(name: str) -> None:
    rng = random.Random(name)
    stored_format = FORMATS[name]
    fields = JsonFields({"quantization_config": stored_format.quantization}, "config.json")
    weight_format = read_weight_format(fields, METHODS)
    assert weight_format is not None
    for seed in range(12):
        shape = (8 * rng.randrange(1, 9), 32 * rng.randrange(1, 5))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        tensors, meant = stored_format.store(values)
        entries = {
            f"layer.{part}": TensorEntry(
                f"layer.{part}", Path(), DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, 0
            )
            for part, tensor in tensors.items()
            if part != "weight_shape"
        }

        def read(entry: TensorEntry, take: tuple[slice, ...], all_: dict = tensors) -> Tensor:
            part: Tensor = all_[entry.name.removeprefix("layer.")][take]
            return part

        found = find_format("layer.weight", entries, weight_format)
        assert found is not None
        parts: Parts = {role: entries[part] for role, part in found[1].items()}
        check_parts(parts, shape, found[0])
        for _ in range(8):
            take = tuple(slice(*sorted(rng.sample(range(size + 1), 2))) for size in shape)
            codes = read_stored(read, parts, shape, take, found[0], torch.device("cpu"))
            assert isinstance(codes, Codes)
            assert torch.equal(codes.widen(), meant[take]), (shape, take)


def test_a_stored_zero_of_gptq_wraps_around() -> None:
    """A zero point of 0 is written as the largest code."""
    values = torch.rand(8, 32) + 0.5
    tensors, meant = store_gptq(4, is_symmetric=False)(values)
    assert (tensors["qzeros"] == -1).all()
    assert (meant >= 0).all()


def test_layers_that_are_left_out_stay_plain(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def is_stored(name: str, values: Tensor) -> bool:
        return is_linear(name, values) and "mlp" in name and "layers.1" not in name

    paths = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS["gptq"], is_stored)
    stored, meant = (load_model(path) for path in paths)
    pairs = zip(targets(stored), targets(meant), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_a_checkpoint_may_mix_formats(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    mixed = compressed("mixed-precision", {})
    mixed["config_groups"] = {
        "a": {
            "targets": [r"re:.*self_attn\.(q|k|v)_proj$", NAME],
            "format": "int-quantized",
            "weights": integers(8, "channel"),
            "input_activations": TOKEN_INPUTS,
        },
        "b": {
            "targets": [r"re:.*(mlp|self_attn)\..*"],
            "format": "pack-quantized",
            "weights": integers(4, "group", group_size=16),
        },
    }
    stores = (store_packed(4, 16, is_symmetric=True), store_bytes)
    plain, meant = tiny_checkpoint("llama"), {}
    written: dict[str, Tensor] = {}
    for name, values in load_file(plain / "model.safetensors").items():
        meant[name] = written[name] = values
        if is_linear(name, values):
            is_first = name[: -len(".weight")] == NAME or name.split(".")[-2][0] in "qkv"
            parts, meant[name] = stores[is_first](values)
            del written[name]
            written |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    stored, _ = write_twins(plain, tmp_path, StoredFormat(mixed, store_bytes))
    save_file(written, stored / "model.safetensors")
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    pairs = zip(targets(load_model(stored)), targets(load_model(tmp_path / "meant")), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_biases_of_zeros_are_left_out_and_others_are_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS["gptq"])
    edit_tensors(path, lambda tensors: tensors.update({f"{NAME}.bias": torch.zeros(64)}))
    load_model(path)
    edit_tensors(path, lambda tensors: tensors.update({f"{NAME}.bias": torch.ones(64)}))
    with pytest.raises(ConfigError, match=rf"unexpected 1 tensors: {NAME}\.bias"):
        load_model(path)


def test_what_two_servers_compare_tells_formats_apart(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    prints = []
    for name in ("gptq", "gptq v2", "awq"):
        path, _ = write_twins(tiny_checkpoint("llama"), tmp_path / name, FORMATS[name])
        prints.append(model_fingerprint(path, read_served_config(path)))
    assert len({p["config"] for p in prints}) == len({p["weights"] for p in prints}) == 3
    assert len({p["dtype"] for p in prints}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.scales"), rf"lacks 1 tensors: {NAME}\.scales"),
        (lambda t: t.pop(f"{NAME}.qzeros"), rf"lacks 1 tensors: {NAME}\.qzeros"),
        (lambda t: t.pop(f"{NAME}.qweight"), rf"lacks 1 tensors: {NAME}\.weight; and has"),
        (
            lambda t: t.update({f"{NAME}.scales": torch.ones(3, 64)}),
            rf"{NAME}\.scales is F32 \[3, 64\]: must be \[2, 64\] of .*, one for each 32 elements",
        ),
        (
            lambda t: t.update({f"{NAME}.qweight": torch.ones(8, 64)}),
            rf"{NAME}\.qweight is F32 \[8, 64\]: must be \[8, 64\] of I32, 4 bits an element",
        ),
        (
            lambda t: t.update({f"{NAME}.g_idx": torch.full((64,), 2, dtype=torch.int32)}),
            rf"{NAME}\.g_idx holds 2: must hold groups in 0\.\.1",
        ),
        (
            lambda t: t.update({f"{NAME}.input_scales": torch.ones(1)}),
            rf"unexpected 1 tensors: {NAME}\.input_scales",
        ),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS["gptq"])
    edit_tensors(path, change)
    with pytest.raises(ConfigError, match=message):
        load_model(path)


AWQ_BITS = {"quant_method": "awq", "group_size": 128}
INT4 = integers(4, "group", group_size=128)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (AWQ_BITS | {"version": "gemv"}, r'version = "gemv": must be "gemm"'),
        (AWQ_BITS | {"bits": 8}, r"bits = 8: must be 4"),
        (AWQ_BITS | {"zero_point": False}, r"zero_point = false: must be true"),
        (GPTQ | {"bits": 3}, r"bits = 3: must be 4 or 8"),
        (GPTQ | {"bits": 4, "group_size": 0}, r"group_size = 0: must be an integer of at least 1"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, r'must be "gptq" or "gptq_v2"'),
        (GPTQ | {"bits": 4, "dynamic": {"-:.*q": {}}}, r"dynamic = .*: must be absent"),
        (compressed("nvfp4-pack-quantized", INT4), r'format = "nvfp4-pack-quantized": must be "p'),
        (compressed("pack-quantized", INT4 | {"num_bits": 3}), r"num_bits = 3: must be 4 or 8"),
        (compressed("int-quantized", INT4), r"num_bits = 4: must be 8"),
        (compressed("pack-quantized", INT4 | {"strategy": "block"}), r'strategy = "block": must'),
        (compressed("pack-quantized", {}) | {"config_groups": {}}, r"config_groups = {}: must be"),
        (
            compressed("pack-quantized", INT4) | {"sparsity_config": {"format": "sparse-24"}},
            r"sparsity_config = .*: must be absent",
        ),
        (compressed("pack-quantized", INT4, targets=["re:("]), r"re:\( .*a regular expression"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    quantization: dict[str, object], message: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, _ = write_twins(tiny_checkpoint("llama"), tmp_path, FORMATS["gptq"])
    edit_config(path, quantization_config=quantization)
    with pytest.raises(ConfigError, match=message):
        load_model(path)
