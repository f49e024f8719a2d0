"""Models for the measurements of prefix reuse: one of each kind of cache, with random weights.

They are small, and large enough that a prompt of a few thousand tokens takes a core some tenths of
a second. Their cache is worked out by hand, so that what the servers move is held against something
that knows nothing of layouts. Knows nothing of servers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

TOKENIZER = Path(__file__).parent.parent / "demo" / "checkpoint"
VOCAB_SIZE = 1280  # of the tokenizer
CONTEXT_LENGTH = 8192
LAYERS = 4
FLOAT_NBYTES = 4

COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ATTENTION_ROW = 2 * 2 * 64 * FLOAT_NBYTES  # keys and values of 2 heads, on one layer


@dataclass(frozen=True, slots=True)
class ReuseModel:
    """token_nbytes: of the cache that grows with the prompt. window: tokens that some layers see at
    most, window_token_nbytes: of one of them. state_nbytes: of what a sequence has once."""

    name: str
    config: dict[str, object]
    token_nbytes: int
    window: int = 0
    window_token_nbytes: int = 0
    state_nbytes: int = 0

    def new_nbytes(self, prompt_count: int, known_count: int) -> int:
        """Cache bytes of a prompt that a server lacks which has its first `known_count` tokens.

        A window and a state are lacking whole: they are those of this very prompt.
        """
        in_window = max(0, min(prompt_count, self.window - 1))
        streamed = self.token_nbytes * (prompt_count - known_count)
        return streamed + self.window_token_nbytes * in_window + self.state_nbytes


WINDOW = 512
LATENT_ROW, ROPE_ROW = 96, 32
KEY_HEADS, VALUE_HEADS, STATE_DIM, KERNEL = 2, 4, 64, 4
STATE_CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * STATE_DIM

MODELS = (
    ReuseModel(
        "plain",
        COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        token_nbytes=LAYERS * ATTENTION_ROW,
    ),
    ReuseModel(
        "windowed",
        COMMON
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        token_nbytes=ATTENTION_ROW,
        window=WINDOW,
        window_token_nbytes=3 * ATTENTION_ROW,
    ),
    ReuseModel(
        "latent",
        COMMON
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "kv_lora_rank": LATENT_ROW,
            "q_lora_rank": 128,
            "qk_rope_head_dim": ROPE_ROW,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": LAYERS,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        token_nbytes=LAYERS * (LATENT_ROW + ROPE_ROW) * FLOAT_NBYTES,
    ),
    ReuseModel(
        "hybrid",
        COMMON
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": VALUE_HEADS,
            "linear_key_head_dim": STATE_DIM,
            "linear_value_head_dim": STATE_DIM,
            "linear_conv_kernel_dim": KERNEL,
        },
        token_nbytes=ATTENTION_ROW,
        state_nbytes=3
        * (STATE_CHANNELS * (KERNEL - 1) + VALUE_HEADS * STATE_DIM * STATE_DIM)
        * FLOAT_NBYTES,
    ),
)


@contextmanager
def written(model: ReuseModel) -> Iterator[Path]:
    """A checkpoint without weights: its config, and the demo's tokenizer."""
    with TemporaryDirectory(prefix="baton-bench-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(model.config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, directory / file)
        yield directory
