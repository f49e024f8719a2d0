"""Which architecture is read, served and cached how."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from common.engine.cast import CACHE_DTYPES
from common.engine.model_config import ModelConfig
from common.engine.model_reading import CheckpointConfig
from common.engine.models.causal_lm import CausalLm, LayerBuilder
from common.engine.models.deepseek import build_deepseek_layer
from common.engine.models.deepseek_config import read_deepseek
from common.engine.models.deepseek_sparse import SparseLm, build_sparse_layer
from common.engine.models.deepseek_sparse_config import read_sparse, sparse_config
from common.engine.models.deepseek_v4 import DeepseekV4Lm, build_deepseek_v4_layer
from common.engine.models.deepseek_v4_config import LayerKind, read_deepseek_v4, v4_config
from common.engine.models.deepseek_v4_names import layer_name
from common.engine.models.falcon import FalconLm, build_falcon_layer, rename_falcon
from common.engine.models.falcon_config import read_falcon
from common.engine.models.gated_delta_net import delta_config
from common.engine.models.gemma import GemmaLm, build_gemma_layer
from common.engine.models.gemma4 import Gemma4Lm, build_gemma4_layer, gemma4_config
from common.engine.models.gemma4_config import read_gemma4
from common.engine.models.gemma_config import read_gemma
from common.engine.models.gpt_oss import GptOssLm, build_gpt_oss_layer
from common.engine.models.gpt_oss_config import read_gpt_oss
from common.engine.models.kda_config import kda_config, read_kimi_linear, read_ling_3
from common.engine.models.latent_hybrid import (
    KdaLm,
    build_kda_layer,
    rename_kimi_linear,
    rename_ling,
)
from common.engine.models.lightning import LightningLm, build_lightning_layer
from common.engine.models.lightning_config import lightning_config, read_ling_2_5
from common.engine.models.llama import build_llama_layer
from common.engine.models.llama_config import read_llama
from common.engine.models.mamba_config import MambaFamily
from common.engine.models.nemotron import NemotronLm, build_nemotron_layer, rename_nemotron
from common.engine.models.nemotron_config import read_nemotron
from common.engine.models.qwen3_moe import build_qwen3_moe_layer
from common.engine.models.qwen3_next import (
    Qwen3NextLm,
    build_qwen3_next_layer,
    rename_qwen3_next,
)
from common.engine.models.qwen3_next_config import read_qwen3_next
from common.engine.weights import same_name, text_name
from common.errors import ConfigError
from common.layout.component import CacheComponent
from common.layout.families import (
    CachedHeads,
    compressed_components,
    gated_delta_components,
    gqa_components,
    hybrid_mla_components,
    lightning_components,
    mamba_components,
    mixed_gqa_components,
    mla_components,
    sparse_mla_components,
    windowed_gqa_components,
)


@dataclass(frozen=True, slots=True)
class Family:
    """read: config.json to `ModelConfig`. build_layer: the model's layers.

    components: (config, cache dtype) to what it caches. model: what stands around the layers.
    rename: a checkpoint's tensor name to the one that layers ask for, None for a tensor that is
        not of the decoder.
    """

    read: Callable[[CheckpointConfig], ModelConfig]
    build_layer: LayerBuilder
    components: Callable[[ModelConfig, str], tuple[CacheComponent, ...]]
    model: type[CausalLm] = CausalLm
    rename: Callable[[str], str | None] = same_name


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


def _compressed(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    v4 = v4_config(config)
    return compressed_components(
        layer_count=config.layer_count,
        window=v4.window,
        head_dim=config.head_dim,
        index_dim=v4.index_dim,
        sparse_layers=v4.layers_of(LayerKind.SPARSE),
        sparse_ratio=v4.sparse_ratio,
        heavy_layers=v4.layers_of(LayerKind.HEAVY),
        heavy_ratio=v4.heavy_ratio,
        dtype=dtype,
    )


def _sparse_mla(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    assert config.mla is not None
    sparse = sparse_config(config)
    return sparse_mla_components(
        layer_count=config.layer_count,
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_interleaved=config.rope.is_interleaved,
        index_layers=sparse.layers,
        index_dim=sparse.head_dim,
        is_index_interleaved=sparse.is_interleaved,
        dtype=dtype,
    )


def _gated_delta(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    delta = delta_config(config)
    attention_layers = sorted(set(range(config.layer_count)) - set(delta.linear_layers))
    slots = gated_delta_components(
        layers=delta.linear_layers,
        key_heads=(delta.key_head_count, delta.key_dim),
        value_heads=(delta.value_head_count, delta.value_dim),
        kernel_size=delta.kernel_size,
        conv_dtype=config.dtype,
        state_dtype=delta.state_dtype,
    )
    keys_values = (
        replace(component, layers=tuple(attention_layers)) for component in _gqa(config, dtype)
    )
    return (*keys_values, *slots)


def _mixed_gqa(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    family = gemma4_config(config)
    shapes = [
        CachedHeads(config.windows[layer], heads.kv_count, heads.dim)
        if family.owners[layer] == layer
        else None
        for layer, heads in enumerate(family.heads)
    ]
    return mixed_gqa_components(shapes, dtype)


def _mamba(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    family = config.family
    assert isinstance(family, MambaFamily), config.architecture
    mamba = family.mamba
    slots = mamba_components(
        layers=family.mamba_layers,
        heads=(mamba.head_count, mamba.head_dim),
        groups=(mamba.group_count, mamba.state_dim),
        kernel_size=mamba.kernel_size,
        conv_dtype=config.dtype,
    )
    keys_values = (
        replace(
            component,
            layers=family.attention_layers,
            order=component.order if family.is_rotated else "",
        )
        for component in _gqa(config, dtype)
    )
    return (*keys_values, *slots)


def _kda(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    kda = kda_config(config)
    heads = (kda.head_count, kda.head_dim)
    slots = gated_delta_components(
        layers=kda.linear_layers,
        key_heads=heads,
        value_heads=heads,
        kernel_size=kda.kernel_size,
        conv_dtype=config.dtype,
        state_dtype="float32",
    )
    return (*_hybrid_mla(config, kda.linear_layers, kda.is_rotated, dtype), *slots)


def _lightning(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    lightning = lightning_config(config)
    slots = lightning_components(
        layers=lightning.linear_layers,
        head_count=config.head_count,
        head_dim=lightning.head_dim,
    )
    return (*_hybrid_mla(config, lightning.linear_layers, True, dtype), *slots)


def _hybrid_mla(
    config: ModelConfig, linear_layers: Collection[int], is_rotated: bool, dtype: str
) -> tuple[CacheComponent, ...]:
    assert config.mla is not None
    return hybrid_mla_components(
        layers=tuple(layer for layer in range(config.layer_count) if layer not in linear_layers),
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_rotated=is_rotated,
        dtype=dtype,
    )


_LLAMA = Family(read_llama, build_llama_layer, _gqa)
_DEEPSEEK = Family(read_deepseek, build_deepseek_layer, _mla)
_SPARSE = Family(read_sparse, build_sparse_layer, _sparse_mla, model=SparseLm)
_GEMMA = Family(read_gemma, build_gemma_layer, _gqa, model=GemmaLm)
_QWEN3_NEXT = Family(
    read_qwen3_next,
    build_qwen3_next_layer,
    _gated_delta,
    model=Qwen3NextLm,
    rename=rename_qwen3_next,
)
_GEMMA4 = Family(read_gemma4, build_gemma4_layer, _mixed_gqa, model=Gemma4Lm)

FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": Family(read_llama, build_qwen3_moe_layer, _gqa),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": Family(
        read_deepseek_v4,
        build_deepseek_v4_layer,
        _compressed,
        model=DeepseekV4Lm,
        rename=layer_name,
    ),
    "FalconH1ForCausalLM": Family(
        read_falcon, build_falcon_layer, _mamba, model=FalconLm, rename=rename_falcon
    ),
    "NemotronHForCausalLM": Family(
        read_nemotron, build_nemotron_layer, _mamba, model=NemotronLm, rename=rename_nemotron
    ),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": replace(_GEMMA, rename=text_name),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, rename=text_name),
    "KimiLinearForCausalLM": Family(
        read_kimi_linear, build_kda_layer, _kda, model=KdaLm, rename=rename_kimi_linear
    ),
    "BailingMoeV2_5ForCausalLM": Family(
        read_ling_2_5, build_lightning_layer, _lightning, model=LightningLm, rename=rename_ling
    ),
    "BailingHybridForCausalLM": Family(
        read_ling_3, build_kda_layer, _kda, model=KdaLm, rename=rename_ling
    ),
    "GptOssForCausalLM": Family(read_gpt_oss, build_gpt_oss_layer, _gqa, model=GptOssLm),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_NEXT,
}

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)


def read_model_config(model_path: Path) -> ModelConfig:
    """The model of a checkpoint directory, in either spelling of config.json.

    Raises: ConfigError if the directory or file is missing or unreadable, the architecture is not
        supported, or a value is missing, impossible or not implemented; it names file and value.
    """
    source = CheckpointConfig.read(model_path, architectures=SUPPORTED_ARCHITECTURES)
    return FAMILIES[source.architecture].read(source)


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
