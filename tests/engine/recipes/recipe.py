"""What a tiny checkpoint is made from, and the values that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Classes = dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]]
"""transformers' config and model of an architecture."""

VOCAB_SIZE = 512
# 8 query heads on 2 KV heads, so that tensor parallel size 4 has to replicate.
COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE: dict[str, object] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
# The two mscales differ, so that the factor on cos and sin is not 1.
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}
PROPORTIONAL_ROPE: dict[str, object] = {
    "rope_type": "proportional",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
DEFAULT_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Recipe:
    """A tiny checkpoint: an architecture, and what its config changes from COMMON.

    norm_mean: around which weights of norms lie; 0 where they are offsets from one.
    draws_own: fills a parameter or buffer, by its name, that must not be drawn like all others;
        False for one that must.
    """

    architecture: str
    changes: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    norm_mean: float = 1.0
    draws_own: Callable[[str, Tensor, torch.Generator], bool] | None = None

    @property
    def is_tied(self) -> bool:
        return self.changes.get("tie_word_embeddings") is True
