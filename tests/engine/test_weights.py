"""Loading weights: files, slices, ways of storing experts, noise, and every refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.engine.layers.embedding import VocabTable
from common.engine.layers.layer_context import LayerContext
from common.engine.loader import load_model, read_served_config
from common.engine.models.causal_lm import CausalLm
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import (
    RECIPES,
    Change,
    build_checkpoint,
    edit_config,
    edit_tensors,
    random_prompt,
)

Checkpoints = Callable[[str], Path]


@pytest.fixture
def checkpoint(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A copy of the llama checkpoint that a test may break."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


def logits_of(model: CausalLm) -> Tensor:
    sequence = Sequence(random_prompt(20, 1), shuffled_pages(4, 1))
    return forward(model, make_pool(model, 4), [sequence.chunk(20)])


def checkpoint_values(model: CausalLm, *, way: int = 0) -> dict[str, list[Tensor]]:
    """Every piece of a model's tensors, by name in the checkpoint."""
    values: dict[str, list[Tensor]] = {}
    for weight in model.weights():
        for piece in weight.ways[way if len(weight.ways) > 1 else 0]:
            values.setdefault(piece.name, []).append(piece.target)
    return values


def test_many_files_load_like_one(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    build_checkpoint(RECIPES["llama"], tmp_path, file_nbytes_max=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = logits_of(load_model(tiny_checkpoint("llama")))
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


def test_experts_load_alike_from_single_and_stacked_tensors(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    is_stacked = "model.layers.0.mlp.experts.gate_up_proj" in tensors
    for layer in (0, 2):
        name = f"model.layers.{layer}.mlp.experts"
        if is_stacked:
            gate_up, down = (tensors.pop(f"{name}.{p}_proj") for p in ("gate_up", "down"))
            for expert in range(8):
                gate, up = gate_up[expert].chunk(2)
                tensors[f"{name}.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{name}.{expert}.up_proj.weight"] = up.contiguous()
                tensors[f"{name}.{expert}.down_proj.weight"] = down[expert].contiguous()
        else:
            single = {
                part: torch.stack([tensors.pop(f"{name}.{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{name}.gate_up_proj"] = torch.cat([single["gate"], single["up"]], dim=1)
            tensors[f"{name}.down_proj"] = single["down"]
    save_file(tensors, path)
    expected = logits_of(load_model(tiny_checkpoint("qwen3_moe")))
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_tied", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_slices_of_all_ranks_make_up_every_tensor(
    name: str, tp_size: int, tiny_checkpoint: Checkpoints
) -> None:
    """8 query heads, 2 KV heads: from tp 4 on, consecutive ranks hold the same KV head."""
    path = tiny_checkpoint(name)
    whole = checkpoint_values(load_model(path))
    parts = [
        checkpoint_values(load_model(path, parallel=ParallelContext(rank, tp_size)))
        for rank in range(tp_size)
    ]
    for tensor_name, (expected, *_) in whole.items():
        found = [part[tensor_name][0] for part in parts]
        if any(kv in tensor_name for kv in ("k_proj", "v_proj")) and tp_size > 2:
            replicas = tp_size // 2
            assert all(torch.equal(f, found[r // replicas * replicas]) for r, f in enumerate(found))
            found = found[::replicas]
        if "norm" in tensor_name or found[0].shape == expected.shape:
            assert all(torch.equal(part, expected[: len(part)]) for part in found)
            continue
        split = next(d for d in range(expected.dim()) if found[0].shape[d] != expected.shape[d])
        assert torch.equal(torch.cat(found, dim=split), expected)


def test_stages_hold_their_layers_and_nothing_else(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("qwen2_tied")
    first, last = (load_model(path, parallel=ParallelContext(0, 1, r, 2)) for r in range(2))
    assert (first.layer_ids, last.layer_ids) == (range(2), range(2, 3))
    first_names, last_names = (set(checkpoint_values(model)) for model in (first, last))
    assert first_names & last_names == {"model.embed_tokens.weight"}, "a tied head needs it too"
    assert "model.norm.weight" in last_names and "model.norm.weight" not in first_names
    assert first_names | last_names == set(checkpoint_values(load_model(path)))


def test_vocabulary_that_ranks_do_not_divide_is_padded() -> None:
    rows: list[int] = []
    for rank in range(8):
        context = LayerContext(ParallelContext(rank, 8), torch.device("cpu"), torch.float32)
        table = VocabTable(context, "lm_head", 509, 16)
        assert table.matrix.rows.shape[0] == 64
        rows += table.rows
        assert not table.matrix.rows[len(table.rows) :].any()
    assert rows == list(range(509))


def test_noise_is_one_model_whatever_the_cut(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("qwen3_moe")
    whole = load_model(path, load_format="dummy", seed=3)
    again = load_model(path, load_format="dummy", seed=3)
    other = load_model(path, load_format="dummy", seed=4)
    part = load_model(path, load_format="dummy", seed=3, parallel=ParallelContext(1, 2))
    assert torch.equal(logits_of(whole), logits_of(again))
    assert not torch.equal(logits_of(whole), logits_of(other))
    name = "model.layers.0.mlp.experts.5.gate_proj.weight"
    full = checkpoint_values(whole)[name][0]
    assert torch.equal(checkpoint_values(part)[name][0], full[16:])
    logits = logits_of(whole)
    assert torch.isfinite(logits).all() and 0.1 < logits.std() < 10.0


def test_noise_needs_only_a_config(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("llama") / "config.json", tmp_path)
    assert torch.isfinite(logits_of(load_model(tmp_path, load_format="dummy"))).all()
    with pytest.raises(ConfigError, match=r"must hold model.safetensors or"):
        load_model(tmp_path)


def test_buffers_and_tied_heads_that_old_checkpoints_carry_are_skipped(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint("qwen2_tied"), tmp_path, dirs_exist_ok=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = torch.zeros(512, 64)

    edit_tensors(tmp_path, add)
    expected = logits_of(load_model(tiny_checkpoint("qwen2_tied")))
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


def remove_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def remove_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


def add_bias(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)


def add_layer(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(96, 64)


def transpose(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].t().contiguous()


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_norm, r"lacks 1 tensors: model\.norm\.weight"),
        (remove_layer, r"lacks 9 tensors: .*model\.layers\.2\.input_layernorm\.weight.*, \.\.\."),
        (add_bias, r"has unexpected 1 tensors: model\.layers\.1\.self_attn\.q_proj\.bias"),
        (add_layer, r"has unexpected 1 tensors: model\.layers\.3\.mlp\.up_proj\.weight"),
        (transpose, r"up_proj\.weight has shape \[64, 96\]: config.json asks for \[96, 64\]"),
        (quantise, r"model\.norm\.weight has dtype I8: must be one of F32, BF16"),
    ],
)
def test_wrong_tensors_are_named(change: Change, message: str, checkpoint: Path) -> None:
    edit_tensors(checkpoint, change)
    with pytest.raises(ConfigError, match=message):
        load_model(checkpoint)


def test_config_of_another_size_is_named(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=128)
    with pytest.raises(ConfigError, match=r"shape \[96, 64\]: config.json asks for \[128, 64\]"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 this is a zip, not weights", "is not a safetensors file"),
        (b"\x10" + b"\0" * 7 + b"{" * 16, "broken safetensors header"),
        (b"\x02" + b"\0" * 7 + b"[]", "broken safetensors header"),
        (b"\x08" + b"\0" * 7 + b'{"a": 1}', "broken safetensors header: tensor a"),
    ],
)
def test_broken_weight_files_are_named(content: bytes, message: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{message}"):
        load_model(checkpoint)


def test_file_cut_short_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is cut short"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map .*an object from tensor names"),
        ({"model.norm.weight": "gone.safetensors"}, "gone.safetensors: is named by the index"),
        ({"model.norm.weight": "../model.safetensors"}, "must be a plain file name"),
        ({"model.norm.weight": 5}, "model.norm.weight = 5: must be a string"),
        ({"model.other.weight": "model.safetensors"}, "model.other.weight is not in model.safe"),
    ],
)
def test_wrong_indexes_are_named(
    weight_map: dict[str, object], message: str, checkpoint: Path
) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=message):
        load_model(checkpoint)


def test_a_tensor_in_two_files_is_named(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "second.safetensors")
    weight_map = {"model.norm.weight": "model.safetensors", "lm_head.weight": "second.safetensors"}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"second\.safetensors: tensor .* is also in model\.safe"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype=int8: must be auto or one of float32, bfloat16, float16"),
        ({"load_format": "gguf"}, "load_format=gguf: must be one of auto, dummy"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, str], message: str, tiny_checkpoint: Checkpoints
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(tiny_checkpoint("llama"), **arguments)  # type: ignore[arg-type]


def test_served_dtype_overrides_the_checkpoint(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("llama")
    assert read_served_config(path).dtype == "float32"
    assert read_served_config(path, dtype="bfloat16").dtype == "bfloat16"
