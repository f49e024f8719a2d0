"""Checkpoints whose layers choose what they see: spellings, unused tensors, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.config.mla import MlaConfig, RouterConfig
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.config.weight_format import Float8Blocks
from common.engine.loader import load_model
from common.engine.models.deepseek_sparse_config import SparseConfig, sparse_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.cache_layout import ServerLayout
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.test_fp8 import QUANTIZATION, quantise
from tests.engine.test_mla_checkpoints import PUBLISHED_V3
from tests.engine.tiny_checkpoints import edit_config, random_prompt, respell_as_published

Checkpoints = Callable[[str], Path]

INDEXER: dict[str, object] = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
PUBLISHED_V32 = PUBLISHED_V3 | INDEXER | {"architectures": ["DeepseekV32ForCausalLM"]}
PUBLISHED_GLM = (
    PUBLISHED_V3
    | INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "head_dim": 64,
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "quantization_config": None,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": None,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }
)


def read(directory: Path, published: dict[str, object], **changes: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(published | changes))
    return read_model_config(directory)


def test_published_configs_are_understood(tmp_path: Path) -> None:
    v32 = read(tmp_path, PUBLISHED_V32)
    everywhere = tuple(range(61))
    assert v32.mla == MlaConfig(1536, 512, 64, 128, 128)
    assert v32.family == SparseConfig(64, 128, 2048, False, everywhere, ())
    assert (v32.weight_format, v32.extra_layer_count) == (Float8Blocks(128, 128), 1)
    layout = ServerLayout(cache_components(v32, "auto"), 8, ((0, 31), (31, 61)), 64)
    layout.check()
    # All of a page on every rank; one page table for both.
    assert [len(r.groups) for r in layout.ranks] == [1] * 16
    assert {r.groups[0].page_nbytes for r in layout.ranks} == {
        layers * 64 * (576 + 128) * 2 for layers in (31, 30)
    }

    glm = read(tmp_path, PUBLISHED_GLM)
    assert glm.mla == MlaConfig(2048, 512, 64, 192, 256)
    assert glm.moe is not None and glm.moe.router == RouterConfig(True, 1, 1, 2.5)
    assert glm.moe.layers == tuple(range(3, 78))
    assert glm.family == SparseConfig(32, 128, 2048, True, tuple(range(78)), ())


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [
        ({"index_topk_freq": 1}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 2}, (0, 1, 3, 5)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (0, 3)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"index_topk_pattern": "FSSFSF", "index_topk_freq": 2}, (0, 3, 5)),
        ({"index_topk_pattern": ["full", "shared"] * 3}, (0, 2, 4)),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_pattern": "FFFFFF"}, (0,)),
        # The layer that predicts further tokens may be counted.
        ({"index_topk_pattern": "FSSFSFF"}, (0, 3, 5)),
    ],
)
def test_layers_that_choose_are_read_in_every_spelling(
    schedule: dict[str, object], layers: tuple[int, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, PUBLISHED_GLM, num_hidden_layers=6, **schedule)
    sparse = sparse_config(config)
    assert sparse.layers == layers
    assert sorted(sparse.layers + sparse.shared_layers) == list(range(6))
    latent, index = cache_components(config, "auto")
    assert (latent.layers, index.layers) == (tuple(range(6)), layers)
    assert (latent.live, index.segments[0].unit_nbytes) == (index.live, 128 * 2)


def test_a_stage_that_would_begin_with_a_shared_choice_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED_GLM, num_hidden_layers=6, index_topk_pattern="FSFFSF")
    check_parallel(config, 1, 2)
    with pytest.raises(ConfigError, match=r"pp_size=3: must be one of 1, 2; .* with layer 4,"):
        check_parallel(config, 1, 3)


def test_layers_with_experts_are_read_one_by_one(tmp_path: Path) -> None:
    kinds = ["dense", "sparse", "dense", "sparse"]
    config = read(tmp_path, PUBLISHED_V32, num_hidden_layers=4, mlp_layer_types=kinds)
    assert config.moe is not None and config.moe.layers == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": None}, "index_topk is missing"),
        ({"index_n_heads": 0}, "index_n_heads = 0: must be an integer of at least 1"),
        ({"index_head_dim": 32}, "index_head_dim = 32: must be at least qk_rope_head_dim = 64"),
        ({"q_lora_rank": None}, "q_lora_rank is missing: must be an integer: the indexer"),
        ({"rope_interleave": False}, "rope_interleave = false: must be true"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = false: must be true"),
        ({"layer_types": ["full_attention"] * 6}, 'layer_types = .*: must be "indexed_attention"'),
        ({"index_topk_freq": -1}, "index_topk_freq = -1"),
        ({"index_topk_pattern": "FSX"}, "index_topk_pattern .* made of full, F, shared, S"),
        ({"index_topk_pattern": "FS"}, "one kind for each of num_hidden_layers = 6"),
        ({"indexer_types": ["shared"] + ["full"] * 5}, "such that the first layer chooses"),
        ({"mlp_layer_types": ["dense"]}, "one of dense, sparse for each of 6 layers"),
        ({"scoring_func": "softmax"}, 'scoring_func = "softmax": must be "sigmoid"'),
    ],
)
def test_impossible_configs_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED_GLM, **({"num_hidden_layers": 6} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave = true: must be false"),
        ({"index_topk_freq": 2}, "index_topk_freq = 2: must be such that every layer"),
        ({"index_topk_pattern": "F" + "S" * 60}, "index_topk_pattern .* such that every layer"),
    ],
)
def test_what_only_the_other_architecture_does_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED_V32, **changes)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_dsa"])
def test_a_published_checkpoint_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Its spelling, a layer that predicts further tokens, and unused indexers."""
    published = tmp_path / "published"
    shutil.copytree(tiny_checkpoint(name), published)
    respell_as_published(published)
    config = json.loads((published / "config.json").read_text())
    layer_count = config["num_hidden_layers"]
    edit_config(published, layer_types=None, mlp_layer_types=None, num_nextn_predict_layers=1)
    tensors = load_file(published / "model.safetensors")
    indexer = {key: value for key, value in tensors.items() if "layers.0.self_attn.indexer" in key}
    unused = [layer_count]
    if "indexer_types" in config:
        unused.append(1)
        edit_config(published, indexer_types=None, index_topk_pattern="FSFS")
    for layer in unused:
        for key, value in indexer.items():
            tensors[key.replace("layers.0", f"layers.{layer}")] = value.clone()
    save_file(tensors, published / "model.safetensors")
    logits = []
    for path in (tiny_checkpoint(name), published):
        model = load_model(path)
        sequence = Sequence(random_prompt(40, 3), shuffled_pages(4, 1))
        logits.append(forward(model, make_pool(model, 4), [sequence.chunk(40)]))
    assert torch.equal(logits[0], logits[1])


def test_an_indexer_of_float8_blocks_loads_as_its_dequantised_twin(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("deepseek_v32"), tmp_path / "model"))
    tensors, meant = load_file(path / "model.safetensors"), {}
    for part in ("wq_b", "wk"):
        name = f"model.layers.1.self_attn.indexer.{part}.weight"
        tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantise(tensors[name])
    save_file(tensors, path / "model.safetensors")
    edit_config(path, quantization_config=QUANTIZATION)
    found = {p.name: p.target for w in load_model(path).weights() for p in w.ways[0]}
    assert all(torch.equal(found[name], values) for name, values in meant.items())


def test_an_indexer_without_its_bias_is_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("glm_dsa"), tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.self_attn.indexer.k_norm.bias"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 tensors: model\.layers\.2\..*k_norm\.bias"):
        load_model(path)
