"""DeepSeek-V4 as it is published: its names, its config, its float8 and 4-bit floats."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from common.engine.models.deepseek_v4_names import layer_name
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.recipes.compressed import V4, draw_v4
from tests.engine.tiny_checkpoints import (
    Change,
    Recipe,
    build_checkpoint,
    edit_config,
    edit_tensors,
    random_prompt,
)

BLOCK = 32
FLOAT8_MAX = 448.0
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EXPERT = "layers.1.ffn.experts.3.w2"
LINEAR = "layers.1.attn.wo_a"


def respell_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as published, from those that transformers saves, which are half of either kind."""
    renamed = {}
    for name, values in tensors.items():
        bare = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        bare = bare.replace("hc_head.hc_", "hc_head_")
        renamed[re.sub(r"(layers\.\d+\.attn)\.norm\.", r"\1.kv_norm.", bare)] = values
    return renamed


def respell_config(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    kinds = config.pop("layer_types")
    names = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    ratios = [names.get(kind, 128) for kind in kinds]
    hashes = config.pop("mlp_layer_types").count("hash_moe")
    rates = config.pop("compress_rates")
    scaling = ropes["compress"]
    for name in ("attention_factor", "partial_rotary_factor", "rope_theta"):
        del scaling[name]
    scaling["type"] = scaling.pop("rope_type")
    del config["partial_rotary_factor"], config["dtype"]
    config |= {
        # One more, of the layer that predicts more tokens.
        "compress_ratios": [*ratios, 0],
        "compress_rate_hca": rates["heavily_compressed_attention"],
        "num_hash_layers": hashes,
        "rope_scaling": scaling,
        "torch_dtype": "float32",
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it; the published config knows only that the first layers hash."""
    changes = V4 | {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]}
    recipe = Recipe("DeepseekV4ForCausalLM", changes, draws_own=draw_v4)
    return build_checkpoint(recipe, tmp_path_factory.mktemp("v4-saved"))


@pytest.fixture(scope="module")
def published(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the published spelling, with a tensor of a layer that is left out."""
    path = Path(shutil.copytree(saved, tmp_path_factory.mktemp("v4") / "published"))
    tensors = respell_tensors(load_file(saved / "model.safetensors"))
    tensors["mtp.0.hc_head_fn"] = torch.zeros(4, 256)
    save_file(tensors, path / "model.safetensors")
    respell_config(path)
    return path


def test_the_published_spelling_gives_the_same_logits(saved: Path, published: Path) -> None:
    logits = []
    for path in (saved, published):
        model = load_model(path)
        sequence = Sequence(random_prompt(77, 4), shuffled_pages(8, 1))
        logits.append(forward(model, make_pool(model, 8), [sequence.chunk(77)]))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mtp.0.attn.wq_a.weight", None),
        ("model.mtp.0.norm.weight", None),
        ("norm.weight", "model.norm.weight"),
        ("head.weight", "lm_head.weight"),
        ("layers.3.attn.wkv.scale", "model.layers.3.self_attn.kv_proj.weight_scale_inv"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        (
            "layers.3.attn.indexer.compressor.norm.weight",
            "model.layers.3.self_attn.indexer.kv_norm.weight",
        ),
        (
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "model.layers.3.self_attn.indexer.weights_proj.weight",
        ),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        (
            "layers.3.ffn.experts.11.w2.scale",
            "model.layers.3.mlp.experts.11.down_proj.weight_scale_inv",
        ),
        ("layers.x", "layers.x"),
    ],
)
def test_a_tensor_has_the_name_that_layers_ask_for(name: str, expected: str | None) -> None:
    assert layer_name(name) == expected


# ---- quantised -----------------------------------------------------------------------------------


def power_of_two(largest: Tensor, limit: float) -> Tensor:
    """The smallest one by which values come within a limit."""
    return torch.exp2(torch.ceil(torch.log2(largest / limit)))


def to_float8(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(float8, powers of two per block, what they stand for); blocks at the edges are cut short."""
    rows, columns = (-(-size // BLOCK) for size in values.shape)
    stored, meant = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.empty_like(values)
    factors = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            factors[i, j] = power_of_two(values[place].abs().max(), FLOAT8_MAX)
            stored[place] = (values[place] / factors[i, j]).to(torch.float8_e4m3fn)
            meant[place] = stored[place].float() * factors[i, j]
    return stored, factors.to(torch.float8_e8m0fnu), meant


def to_float4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(two codes a byte, powers of two per 32 neighbours, what they stand for)."""
    groups = values.view(len(values), -1, 32)
    factors = power_of_two(groups.abs().amax(dim=-1), 6.0)
    scaled = groups / factors[..., None]
    codes = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(dim=-1)
    meant = MAGNITUDES[codes] * torch.where(scaled < 0, -1.0, 1.0) * factors[..., None]
    codes = (codes + 8 * (scaled < 0)).view(values.shape)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return packed, factors.to(torch.float8_e8m0fnu), meant.view(values.shape)


@pytest.fixture(scope="module")
def twins(published: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(quantised as published, the same values in fp32)."""
    plain, quantised = {}, {}
    for name, values in load_file(published / "model.safetensors").items():
        plain[name] = quantised[name] = values
        is_linear = re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight$", name)
        if is_linear is None or ".compressor." in name:
            continue
        store = to_float4 if ".experts." in name else to_float8
        stored, factors, meant = store(values)
        scale = name.removesuffix("weight") + "scale"
        plain[name] = meant
        quantised |= {name: stored, scale: factors}
    folder = tmp_path_factory.mktemp("twins")
    paths = tuple(Path(shutil.copytree(published, folder / part)) for part in ("packed", "plain"))
    for path, tensors in zip(paths, (quantised, plain), strict=True):
        save_file(tensors, path / "model.safetensors")
    edit_config(
        paths[0],
        expert_dtype="fp4",
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
    )
    return paths[0], paths[1]


def targets(model: CausalLm) -> list[Tensor]:
    return [piece.target for weight in model.weights() for piece in weight.ways[0]]


# Four ranks cut the experts inside the neighbours that share a factor.
@pytest.mark.parametrize("rank", [(0, 1, 0, 1), (1, 2, 0, 1), (3, 4, 1, 2)])
def test_a_quantised_checkpoint_loads_as_its_dequantised_twin(
    rank: tuple[int, int, int, int], twins: tuple[Path, Path]
) -> None:
    packed, plain = (load_model(path, parallel=ParallelContext(*rank)) for path in twins)
    found, expected = targets(packed), targets(plain)
    assert len(found) == len(expected) > 100
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def drop_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERT}.scale"]


def shorten(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"][:, :8].contiguous()


def widen_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.scale"] = tensors[f"{EXPERT}.scale"].float()


def spoil_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LINEAR}.scale"] = tensors[f"{LINEAR}.scale"][:1].contiguous()


def spoil_table(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.tid2eid"][5, 1] = 8


def spoil_table_type(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop_scale, r"lacks 1 tensors: model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"),
        (shorten, r"experts.3.w2.weight is I8 \[64, 8\]: must be \[64, 16\] of I8, U8, two"),
        (widen_scale, r"experts.3.w2.scale is F32 \[64, 1\]: must be \[64, 1\] of F8_E8M0, one"),
        (spoil_blocks, r"wo_a.scale is F8_E8M0 \[1, 2\]: must be \[2, 2\] of F32, .*32 x 32"),
        (spoil_table, r"tid2eid holds 8: must hold integers in 0..7"),
        (spoil_table_type, r"tid2eid has dtype F32: must be one of I64, I32"),
    ],
)
def test_a_wrong_tensor_is_named(
    change: Change, complaint: str, twins: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(twins[0], tmp_path / "wrong"))
    edit_tensors(path, change)
    with pytest.raises(ConfigError, match=complaint):
        load_model(path)


def test_packed_tensors_need_a_quantization_config(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(twins[0], tmp_path / "bare"))
    edit_config(path, quantization_config=None)
    with pytest.raises(ConfigError, match=r"has dtype (F8_E4M3|I8): must be one of F32"):
        load_model(path)
