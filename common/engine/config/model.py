"""The model as every part of the engine reads it: sizes, norms, rotation, experts, windows.

The values come from a checkpoint; `reading.py` and each family's own reader fill them in.
Knows nothing of files, tensors or devices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.engine.config.mla import MlaConfig, RouterConfig
from common.engine.config.rope import RopeConfig
from common.engine.config.weight_format import WeightFormat
from common.errors import ConfigError
from common.layout.parallel import split_layers


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """Settings that only one family's layers read. A family subclasses it for its own."""

    def cuts(self) -> Mapping[str, int]:
        """Sizes, by the name a user knows, that the tensor parallel size has to divide."""
        return {}

    def shared_cuts(self) -> Mapping[str, int]:
        """Likewise, sizes that it has to divide or be a multiple of: ranks then share a unit."""
        return {}

    def joined_layers(self) -> Collection[int]:
        """Global ids of layers that a pipeline stage can't begin with: they, or layers behind them,
        read what a layer before them left behind in this forward pass, hidden states aside."""
        return ()


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts, and the global layers that have them; the other layers have a plain MLP.

    router: None for a plain softmax and top-k. shared_size: inner width of the MLP that every token
        takes beside its experts, 0 if there is none.
    """

    expert_count: int
    experts_per_token: int
    intermediate_size: int
    is_normalized: bool
    layers: tuple[int, ...]
    router: RouterConfig | None = None
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """The rule for attention scores in all layers of a model; see `ScoreRule`.

    scale: None for head dim ** -0.5. softcap: 0 for none. has_sinks: one per query head.
    """

    scale: float | None = None
    softcap: float = 0.0
    has_sinks: bool = False


PLAIN_SCORES = ScoreConfig()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, whichever architecture it is published as.

    dtype: what the checkpoint asks to be computed in. context_length: tokens, after any extension.
    eos_token_ids: every id that ends an answer, of config.json and generation_config.json.
    rotated_dim: elements of a head that are rotated, if fewer than all.
    mla: of latent attention, where all heads share one KV head and head_dim is the query's.
    weight_format: of quantised weights, which are multiplied out while loading; None if there are
        none.
    extra_layer_count: layers behind the last one that a checkpoint carries to predict more tokens
        at a time; they are not loaded.
    windows: tokens that each layer sees, itself included; 0 for all.
    is_compressed: whether layers see blocks of the past instead of all of it.
    scores: what is done to attention scores beside masking them.
    family: what only this family's layers have.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    is_head_tied: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    moe: MoeConfig | None = None
    rotated_dim: int | None = None
    mla: MlaConfig | None = None
    weight_format: WeightFormat | None = None
    extra_layer_count: int = 0
    windows: tuple[int, ...] = ()
    scores: ScoreConfig = PLAIN_SCORES
    is_compressed: bool = False
    family: FamilyConfig | None = None

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    @property
    def has_plain_attention(self) -> bool:
        """Whether attention is causal softmax over all of the past and no more."""
        return not self.has_windows and self.scores == PLAIN_SCORES

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        if self.rotated_dim is not None:
            return self.rotated_dim
        return self.head_dim if self.mla is None else self.mla.rope_dim


def check_parallel(config: ModelConfig, tp_size: int, pp_size: int) -> None:
    """Raises: ConfigError if the model can't be cut over that many ranks."""
    if not 1 <= pp_size <= config.layer_count:
        raise ConfigError(f"pp_size={pp_size}: must be in 1..{config.layer_count}, the layer count")
    _check_stages(config, pp_size)
    cuts = {
        "attention heads": config.head_count,
        "intermediate_size": config.intermediate_size,
    }
    if config.moe is not None:
        cuts["moe_intermediate_size"] = config.moe.intermediate_size
    if config.family is not None:
        cuts |= config.family.cuts()
    for name, size in cuts.items():
        if tp_size < 1 or size % tp_size != 0:
            raise ConfigError(f"tp_size={tp_size}: must divide {size}, the model's {name}")
    shared_cuts = {"KV heads": config.kv_head_count}
    if config.family is not None:
        shared_cuts |= config.family.shared_cuts()
    for name, size in shared_cuts.items():
        if size % tp_size != 0 and tp_size % size != 0:
            raise ConfigError(
                f"tp_size={tp_size}: must divide or be a multiple of {size}, the model's {name}"
            )


def _check_stages(config: ModelConfig, pp_size: int) -> None:
    torn = _torn_layers(config, pp_size)
    if torn:
        sizes = range(1, config.layer_count + 1)
        allowed = ", ".join(str(size) for size in sizes if not _torn_layers(config, size))
        raise ConfigError(
            f"pp_size={pp_size}: must be one of {allowed}; a stage would begin with layer "
            f"{torn[0]}, but what a layer before it computed is read there or behind it"
        )


def _torn_layers(config: ModelConfig, pp_size: int) -> list[int]:
    """Layers that a stage would begin with although they can't."""
    joined = () if config.family is None else config.family.joined_layers()
    firsts = [first for first, _ in split_layers(config.layer_count, pp_size)]
    return [first for first in firsts if first in joined]
