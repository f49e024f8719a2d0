"""Which architecture is served by which layers and caches what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.engine.cast import CACHE_DTYPES
from common.engine.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from common.engine.models.causal_lm import LayerBuilder
from common.engine.models.deepseek import build_deepseek_layer
from common.engine.models.gemma import build_gemma_layer
from common.engine.models.llama import build_llama_layer
from common.engine.models.qwen3_moe import build_qwen3_moe_layer
from common.errors import ConfigError
from common.layout.component import CacheComponent
from common.layout.families import gqa_components, mla_components, windowed_gqa_components


@dataclass(frozen=True, slots=True)
class Family:
    """build_layer: the model's layers. components: (config, cache dtype) to what it caches."""

    build_layer: LayerBuilder
    components: Callable[[ModelConfig, str], tuple[CacheComponent, ...]]


def _gqa(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    if config.has_windows:
        return windowed_gqa_components(
            windows=config.windows,
            kv_head_count=config.kv_head_count,
            head_dim=config.head_dim,
            dtype=dtype,
        )
    return gqa_components(
        layer_count=config.layer_count,
        kv_head_count=config.kv_head_count,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def _mla(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    assert config.mla is not None
    return mla_components(
        layer_count=config.layer_count,
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_interleaved=config.rope.is_interleaved,
        dtype=dtype,
    )


_LLAMA = Family(build_llama_layer, _gqa)

FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": Family(build_qwen3_moe_layer, _gqa),
    "DeepseekV2ForCausalLM": Family(build_deepseek_layer, _mla),
    "DeepseekV3ForCausalLM": Family(build_deepseek_layer, _mla),
    "Gemma2ForCausalLM": Family(build_gemma_layer, _gqa),
    "Gemma3ForCausalLM": Family(build_gemma_layer, _gqa),
}
assert tuple(FAMILIES) == SUPPORTED_ARCHITECTURES


def cache_components(config: ModelConfig, kv_cache_dtype: str) -> tuple[CacheComponent, ...]:
    """What a model caches, for `ServerLayout`.

    kv_cache_dtype: element type of the cache, "auto" for what the checkpoint is computed in.
    Raises: ConfigError for a type that can't be stored.
    """
    dtype = config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if dtype not in CACHE_DTYPES:
        allowed = ", ".join(CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype={dtype}: must be auto or one of {allowed}")
    return FAMILIES[config.architecture].components(config, dtype)
