"""Checkpoints of a language model and towers for images: the language model alone is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from common.engine.checkpoint.weights import text_name
from common.engine.config.json_fields import JsonFields
from common.engine.config.reading import CheckpointConfig
from common.engine.config.rope import RopeKind
from common.engine.loader import load_model
from common.engine.models.registry import read_model_config
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import RECIPES, edit_config, random_prompt, redraw

Checkpoints = Callable[[str], Path]

VISION: dict[str, object] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PROMPT = random_prompt(40, 3)


def logits_of(path: Path) -> torch.Tensor:
    model = load_model(path)
    sequence = Sequence(PROMPT, shuffled_pages(4, 1))
    return forward(model, make_pool(model, 4), [sequence.chunk(40, all_logits=True)])


def part(fields: dict[str, object], **defaults: object) -> JsonFields:
    return CheckpointConfig("any", JsonFields(fields, "f"), None).text_part(defaults).fields


@torch.inference_mode()
def test_a_composite_gives_the_logits_of_transformers_under_every_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    text = json.loads((tiny_checkpoint("gemma3") / "config.json").read_text())
    config = Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=511
    )
    reference = Gemma3ForConditionalGeneration(config).eval()
    redraw(reference, RECIPES["gemma3"])
    reference.save_pretrained(tmp_path)
    expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0.0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in tensors
    renamed = {
        name.replace("language_model.model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0.0)


def test_a_published_composite_leaves_most_to_the_model_code(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    document = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = read_model_config(tmp_path)
    assert (config.vocab_size, config.context_length) == (262208, 131072)
    assert (config.head_count, config.kv_head_count, config.head_dim) == (8, 4, 256)
    assert (config.dtype, config.eos_token_ids, config.is_head_tied) == ("bfloat16", (1, 106), True)
    assert (config.rope.kind, config.rope.factor) == (RopeKind.LINEAR, 8.0)
    assert config.windows[:7] == (1024,) * 5 + (0, 1024)
    edit_config(tmp_path, text_config=text | {"num_hidden_layers": 0})
    with pytest.raises(ConfigError, match="text_config: num_hidden_layers = 0: must be an integer"):
        read_model_config(tmp_path)


def test_what_is_said_of_the_whole_model_wins() -> None:
    fields = part(
        {
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "hidden_size": 1,
            "text_config": {"dtype": "float32", "tie_word_embeddings": True, "hidden_size": 64},
        },
        hidden_size=5,
        vocab_size=9,
    )
    assert fields.values == {
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "vocab_size": 9,
    }
    inner = {"dtype": "float32", "tie_word_embeddings": True}
    assert part({"hidden_size": 1, "text_config": inner}).values == inner
    plain = {"hidden_size": 1}
    assert part(plain, vocab_size=9).values == plain, "defaults are of composites"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.layers.0.q_proj.weight", None),
        ("vision_tower.vision_model.head.bias", None),
        ("multi_modal_projector.mm_soft_emb_norm.weight", None),
    ],
)
def test_names_of_the_language_model(name: str, expected: str | None) -> None:
    assert text_name(name) == expected
