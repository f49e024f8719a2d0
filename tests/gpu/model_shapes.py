"""Models that the GPU check runs: the shapes of real ones, with random weights.

Knows nothing of servers.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.load_cases import LoadCase

TOKENIZER = Path(__file__).parents[2] / "demo" / "checkpoint"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine alone computes. tokens, short_tokens: in the cache of each stream that
    decodes, which are compared. prompts: lengths that are computed in one chunk, and the longest of
    them in chunks of `chunk` as well."""

    streams: int
    tokens: int
    short_tokens: int
    prompts: tuple[int, ...]
    chunk: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model with random weights. compared: prompt lengths whose answers must be equal.

    timed: prompt lengths whose first token is timed. itl_prompt: prompt of the timed decode.
    pool_tokens: of a server, unless a load needs more.
    """

    name: str
    config: dict[str, object]
    pool_tokens: int
    compared: tuple[int, ...]
    timed: tuple[int, ...]
    itl_prompt: int
    loads: tuple[LoadCase, ...]
    engine: EngineLoad

    @property
    def vocab_size(self) -> int:
        return int(str(self.config["vocab_size"]))


LLAMA_8B = ModelShape(
    "Llama-3.1-8B",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    pool_tokens=65536,
    compared=(1, 15, 16, 17, 300, 2148),
    timed=(128, 2048, 8192),
    itl_prompt=512,
    loads=(
        LoadCase(512, 256, 32, 128),
        LoadCase(512, 256, 128, 512),
        LoadCase(4096, 256, 32, 96),
    ),
    engine=EngineLoad(streams=64, tokens=4096, short_tokens=128, prompts=(2048, 8192), chunk=2048),
)
# For a rehearsal of this script where there is no GPU.
TINY = ModelShape(
    "tiny",
    LLAMA_8B.config
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
    },
    pool_tokens=8192,
    compared=(1, 15, 16, 17, 300, 2148),
    timed=(128,),
    itl_prompt=64,
    loads=(LoadCase(64, 8, 4, 8), LoadCase(64, 8, 8, 16), LoadCase(256, 8, 4, 8)),
    engine=EngineLoad(streams=8, tokens=2048, short_tokens=16, prompts=(128, 512), chunk=128),
)


def write_model(directory: Path, shape: ModelShape) -> Path:
    """A checkpoint without weights: its config, and the demo's tokenizer."""
    (directory / "config.json").write_text(json.dumps(shape.config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    return directory
