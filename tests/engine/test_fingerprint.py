"""Two servers of one model agree on its fingerprint; any other model differs in a readable line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.checkpoint.fingerprint import model_fingerprint
from common.engine.config.added import ADDED, named_fields
from common.engine.loader import read_served_config
from tests.engine.tiny_checkpoints import (
    RECIPES,
    build_checkpoint,
    edit_config,
    respell_as_published,
)

Checkpoints = Callable[[str], Path]


def fingerprint(path: Path, *, dtype: str = "auto", load_format: str = "auto") -> dict[str, str]:
    return model_fingerprint(path, read_served_config(path, dtype=dtype), load_format=load_format)


def differing(first: dict[str, str], second: dict[str, str]) -> set[str]:
    assert first.keys() == second.keys()
    return {key for key in first if first[key] != second[key]}


@pytest.fixture
def copy(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("qwen2_yarn"), tmp_path / "copy"))


def test_spelling_and_number_of_files_do_not_matter(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    build_checkpoint(RECIPES["qwen2_yarn"], tmp_path, file_nbytes_max=100_000)
    respell_as_published(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path) == fingerprint(tiny_checkpoint("qwen2_yarn"))


def test_values_are_readable(tiny_checkpoint: Checkpoints) -> None:
    found = fingerprint(tiny_checkpoint("qwen2_yarn"))
    assert found["architecture"] == "Qwen2ForCausalLM"
    assert found["heads"] == "8 query, 2 kv, dim 8"
    assert "kind=yarn" in found["rope"] and "factor=4.0" in found["rope"]
    assert found["eos_token_ids"] == "2" and found["dtype"] == "float32"


def test_the_rank_of_a_latent_cache_is_readable(tiny_checkpoint: Checkpoints) -> None:
    assert fingerprint(tiny_checkpoint("deepseek_v3"))["latent"] == "rank 32, rotated 16"
    assert fingerprint(tiny_checkpoint("llama"))["latent"] == ""


def test_computing_in_another_dtype_is_one_line(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("llama")
    assert differing(fingerprint(path), fingerprint(path, dtype="bfloat16")) == {"dtype"}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"rms_norm_eps": 1e-6}, {"config"}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"config", "rope"}),
        ({"eos_token_id": 9}, {"eos_token_ids"}),
        ({"use_cache": False, "transformers_version": "0"}, set()),
    ],
)
def test_config_changes_show_where_they_matter(
    changes: dict[str, object], lines: set[str], copy: Path, tiny_checkpoint: Checkpoints
) -> None:
    (copy / "generation_config.json").unlink(missing_ok=True)
    before = fingerprint(copy)
    edit_config(copy, **changes)
    assert differing(before, fingerprint(copy)) == lines


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_other_weights_are_one_line(name: str, copy: Path, tiny_checkpoint: Checkpoints) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, copy / "model.safetensors")
    assert differing(fingerprint(copy), fingerprint(tiny_checkpoint("qwen2_yarn"))) == {"weights"}


def test_weights_stored_in_another_dtype_differ(copy: Path, tiny_checkpoint: Checkpoints) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        copy / "model.safetensors",
    )
    assert differing(fingerprint(copy), fingerprint(tiny_checkpoint("qwen2_yarn"))) == {"weights"}


def test_noise_is_identified_by_its_seed(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("llama")
    config = read_served_config(path)
    first, second = (
        model_fingerprint(path, config, load_format="dummy", seed=seed) for seed in (1, 2)
    )
    assert differing(first, second) == {"weights"}
    assert differing(first, fingerprint(path)) == {"weights"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_servers_of_the_first_release_have_the_same_fingerprint(
    recipe: str, tiny_checkpoint: Checkpoints
) -> None:
    """If a config has gained a field: `metadata=ADDED` says that its default changes nothing."""
    released = json.loads((Path(__file__).parent / "released_configs.json").read_text())
    if recipe not in released:
        pytest.skip("the release did not serve it")
    assert fingerprint(tiny_checkpoint(recipe))["config"] == released[recipe]


def test_an_added_field_is_named_where_it_is_not_its_default() -> None:
    @dataclass
    class Config:
        size: int
        gain: float = field(default=1.0, metadata=ADDED)

    assert [one.name for one in named_fields(Config(3))] == ["size"]
    assert [one.name for one in named_fields(Config(3, 2.0))] == ["size", "gain"]
