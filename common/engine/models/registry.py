"""Which architecture is read, served and cached how, collected from the modules of the families."""

from __future__ import annotations

from pathlib import Path

from common.engine.cache.cast import CACHE_DTYPES
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.models import (
    deepseek,
    deepseek_sparse,
    deepseek_v4,
    falcon,
    gemma,
    gemma4,
    gpt_oss,
    latent_hybrid,
    lightning,
    llama,
    nemotron,
    qwen3_moe,
    qwen3_next,
)
from common.engine.models.family import Family, draft_gqa_cache
from common.errors import ConfigError
from common.layout.component import CacheComponent
from common.layout.families import with_more_layers
from common.speculative import SpeculativeAlgorithm

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **qwen3_moe.FAMILIES,
    **deepseek.FAMILIES,
    **deepseek_sparse.FAMILIES,
    **deepseek_v4.FAMILIES,
    **falcon.FAMILIES,
    **nemotron.FAMILIES,
    **gemma.FAMILIES,
    **gemma4.FAMILIES,
    **latent_hybrid.FAMILIES,
    **lightning.FAMILIES,
    **gpt_oss.FAMILIES,
    **qwen3_next.FAMILIES,
}

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)


def read_model_config(model_path: Path) -> ModelConfig:
    """The model of a checkpoint directory, in either spelling of config.json.

    Raises: ConfigError if the directory or file is missing or unreadable, the architecture is not
        supported, or a value is missing, impossible or not implemented; it names file and value.
    """
    source = CheckpointConfig.read(model_path, architectures=SUPPORTED_ARCHITECTURES)
    return FAMILIES[source.architecture].read(source)


def cache_components(
    config: ModelConfig, kv_cache_dtype: str, draft: DraftConfig | None = None
) -> tuple[CacheComponent, ...]:
    """Components of a model's cache, for `ServerLayout`, with those of its draft's layers.

    kv_cache_dtype: element type of the cache; "auto": that of the computation.
    Raises: ConfigError for a type that can't be stored.
    """
    dtype = config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if dtype not in CACHE_DTYPES:
        allowed = ", ".join(CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype={dtype}: must be auto or one of {allowed}")
    family = FAMILIES[config.architecture]
    if draft is not None and draft.algorithm is SpeculativeAlgorithm.NEXTN:
        return family.components(draft.model, dtype)
    components = family.components(config, dtype)
    return (
        components if draft is None else with_more_layers(components, draft_gqa_cache(draft, dtype))
    )
