"""Gemma 4: what config.json says in every spelling, refusals, published names, cuts over stages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.config.model import ModelConfig, check_parallel
from common.engine.config.reading import Heads
from common.engine.config.rope import RopeKind
from common.engine.loader import load_model
from common.engine.models.gemma4 import gemma4_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.component import FULL, Live, LiveKind
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import Reference, edit_config, random_prompt

Checkpoints = Callable[[str], Path]

NAMES = ("gemma4", "gemma4_moe", "gemma4_e")
SLIDING, WIDE = "sliding_attention", "full_attention"
PLAIN: dict[str, object] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 4096,
}
PAIRS: dict[str, object] = {"layer_types": [SLIDING, WIDE] * 3}
SHARED = PAIRS | {"num_kv_shared_layers": 2}
MOE: dict[str, object] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
PROMPT = random_prompt(40, 3)


def read(directory: Path, **changes: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return read_model_config(directory)


def logits_of(path: Path, dtype: str = "auto") -> Tensor:
    model = load_model(path, dtype=dtype)
    sequence = Sequence(PROMPT, shuffled_pages(4, 1))
    return forward(model, make_pool(model, 4), [sequence.chunk(40, all_logits=True)])


def test_defaults_are_those_of_the_model_code(tmp_path: Path) -> None:
    config = read(tmp_path)
    family = gemma4_config(config)
    assert config.windows == (512,) * 5 + (0,) and config.is_head_tied
    assert family.local_layers == (0, 1, 2, 3, 4) and family.owners == tuple(range(6))
    assert family.heads == (Heads(8, 4, 16),) * 5 + (Heads(8, 4, 32),)
    assert family.local_rope is not None
    assert (family.local_rope.kind, family.local_rope.theta) == (RopeKind.DEFAULT, 1e4)
    assert (config.rope.kind, config.rope.theta) == (RopeKind.PROPORTIONAL, 1e6)
    assert config.rope.turned_share == 0.25
    assert family.logit_softcap == 0.0 and config.moe is None and not family.valueless_layers


def test_the_last_layer_sees_everything_whatever_is_said(tmp_path: Path) -> None:
    config = read(tmp_path, layer_types=[SLIDING, WIDE, SLIDING, SLIDING, WIDE, SLIDING])
    assert config.windows == (512, 0, 512, 512, 0, 0)
    assert gemma4_config(config).heads[5].dim == 32


def test_heads_by_layer_in_both_spellings(tmp_path: Path) -> None:
    changes = PAIRS | {"attention_k_eq_v": True}
    published = read(tmp_path, **changes, num_global_key_value_heads=1)
    entry = {"head_dim": 32, "num_key_value_heads": 1}
    by_layer = {str(layer): entry for layer in (1, 3, 5)}
    nested = read(tmp_path, **changes, per_layer_config=by_layer)
    assert nested == published
    family = gemma4_config(nested)
    assert family.heads == (Heads(8, 4, 16), Heads(8, 1, 32)) * 3
    assert family.valueless_layers == (1, 3, 5)
    ungated = read(tmp_path, **PAIRS, num_global_key_value_heads=1)
    assert gemma4_config(ungated).heads[1].kv_count == 4, "for layers without values only"


def test_shared_layers_read_the_last_owner_of_their_type(tmp_path: Path) -> None:
    config = read(tmp_path, **SHARED, use_double_wide_mlp=True)
    family = gemma4_config(config)
    assert family.owners == (0, 1, 2, 3, 2, 3)
    assert family.inner_sizes == (96,) * 4 + (192,) * 2
    wide_key, wide_value, key, value = cache_components(config, "auto")
    assert (wide_key.live, key.live) == (FULL, Live(LiveKind.WINDOW, 512))
    assert wide_key.layers == wide_value.layers == (1, 3) and key.layers == value.layers == (0, 2)
    assert [part.segments[0].unit_nbytes for part in (wide_key, key)] == [32 * 4, 16 * 4]


def test_stages_keep_shared_layers_with_their_owners(tmp_path: Path) -> None:
    config = read(tmp_path, **SHARED)
    with pytest.raises(ConfigError, match=r"pp_size=2: must be one of 1; .* begin with layer 3,"):
        check_parallel(config, 1, 2)
    late = [SLIDING] * 4 + [WIDE, WIDE]
    check_parallel(read(tmp_path, layer_types=late, num_kv_shared_layers=1), 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, 'hidden_activation = "silu": must be "gelu_pytorch_tanh"'),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all": must be'),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6: must be smaller: layer 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2: must be smaller: layer 5"),
        ({"global_head_dim": 31}, "head_dim = 31: must be even"),
        ({"per_layer_config": {"6": {}}}, r"per_layer_config .*: must be of layers 0\.\.5"),
        ({"per_layer_config": {"5": {"rope": 1}}}, "per_layer_config .*: must be of head_dim and"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config .*: must be the same"),
        ({"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "num_key_value_heads = 3: must"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping = -1: must be a number above 0"),
        ({"rope_parameters": {WIDE: {"rope_theta": 1e6}}}, "rope_parameters .*sliding_attention"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 511},
            "vocab_size_per_layer_input = 511: must be at least 512",
        ),
        (MOE | {"top_k_experts": 9}, "top_k_experts = 9: must be at most num_experts = 8"),
        (MOE | {"num_experts": None}, "num_experts is missing"),
    ],
)
def test_impossible_values_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_composite_under_published_names_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Heads by type of layer, unused projections of shared layers, and a tower beside it all."""
    path = tmp_path / "composite"
    shutil.copytree(tiny_checkpoint(name), path)
    text = json.loads((path / "config.json").read_text())
    entry = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = entry["head_dim"]
    text["num_global_key_value_heads"] = entry.get("num_key_value_heads")
    tensors = {
        key.replace("model.", "model.language_model.", 1): tensor
        for key, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.vision_tower.weight"] = torch.zeros(3)
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    for layer in range(first_shared, text["num_hidden_layers"]):
        unused = f"model.language_model.layers.{layer}.self_attn"
        tensors |= {f"{unused}.{part}.weight": torch.ones(2) for part in ("k_proj", "k_norm")}
    save_file(tensors, path / "model.safetensors")
    composite = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "torch_dtype": text.pop("dtype"),
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "text_config": text,
    }
    (path / "config.json").write_text(json.dumps(composite))
    assert torch.equal(logits_of(path), logits_of(tiny_checkpoint(name)))


def test_an_unused_tensor_is_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    shutil.copytree(tiny_checkpoint("gemma4"), path)
    edit_config(path, attention_k_eq_v=False)
    with pytest.raises(ConfigError, match=r"lacks 2 tensors: model.layers.1.self_attn.v_proj"):
        load_model(path)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_near_to_float32_as_transformers(
    name: str, tiny_checkpoint: Checkpoints
) -> None:
    reference = Reference.load(tiny_checkpoint(name))
    exact = reference.logits(PROMPT)
    expected = Reference(reference.model.bfloat16()).logits(PROMPT)
    actual = logits_of(tiny_checkpoint(name), "bfloat16")
    # A router near a tie chooses otherwise in either, so the typical difference is looked at.
    near = (expected - exact).abs().median()
    assert 0.0 < (actual - exact).abs().median() < 1.3 * near
