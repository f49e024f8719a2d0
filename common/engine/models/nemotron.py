"""Nemotron-H: a norm and one mixer in every layer, which is a Mamba-2 mixer, attention that rotates
nothing, a plain MLP of squared ReLUs, or experts of such MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.grouped_moe import GroupedMoeMlp
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, whole_linear
from common.engine.layers.mlp import squared_relu
from common.engine.layers.norm import WideNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.causal_lm import CausalLm
from common.engine.models.family import Family
from common.engine.models.gqa import GqaAttention
from common.engine.models.layer_pass import LayerPass
from common.engine.models.mamba_mixer import MambaMixer, mamba_cache
from common.engine.models.nemotron_config import MixerKind, NemotronConfig, read_nemotron
from common.engine.models.pre_norm_layer import LayerMlp

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


class PlainAttention(GqaAttention):
    """`GqaAttention` without positions."""

    def turn(self, query_key: Tensor, layer_pass: LayerPass) -> tuple[Tensor, Tensor]:
        return query_key[:, : self.head_count], query_key[:, self.head_count :]


class SquaredMlp:
    """down(relu(up(x))^2)."""

    def __init__(
        self, context: LayerContext, name: str, *, hidden_size: int, intermediate_size: int
    ) -> None:
        inner = context.cut(intermediate_size)
        self.up = ColumnLinear(
            context, hidden_size, [OutputBlock(f"{name}.up_proj", intermediate_size, inner)]
        )
        self.down = RowLinear(
            context,
            f"{name}.down_proj",
            input_size=intermediate_size,
            output_size=hidden_size,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(squared_relu(self.up(hidden)))

    def weights(self) -> Iterator[Weight]:
        yield from self.up.weights()
        yield from self.down.weights()


class LatentExperts(GroupedMoeMlp):
    """Experts that may work on a projection of the hidden states, beside an MLP that does not.

    Every rank has all of the two projections: what goes through them is the whole sum.
    """

    def __init__(self, context: LayerContext, name: str, config: ModelConfig) -> None:
        assert config.moe is not None
        hidden_size, io_size = config.hidden_size, nemotron_config(config).expert_io_size
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            moe=replace(config.moe, shared_size=0),
            expert_io_size=io_size,
            activation=squared_relu,
            is_gated=False,
        )
        self.squared = SquaredMlp(
            context,
            f"{name}.shared_experts",
            hidden_size=hidden_size,
            intermediate_size=config.moe.shared_size,
        )
        self.into: ColumnLinear | None = None
        self.back: ColumnLinear | None = None
        if io_size != hidden_size:
            self.into = whole_linear(context, f"{name}.fc1_latent_proj", hidden_size, io_size)
            self.back = whole_linear(context, f"{name}.fc2_latent_proj", io_size, hidden_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, experts = self.route(hidden)
        given = hidden if self.into is None else self.into(hidden)
        routed = self.mix_experts(given, shares, experts)
        if self.back is not None:
            routed = self.back(routed)
        return routed + self.squared(hidden)

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self.squared.weights()
        if self.into is not None and self.back is not None:
            yield from self.into.weights()
            yield from self.back.weights()


class NemotronLayer:
    """x + mixer(norm(x)); an MLP needs nothing of the pass, the other mixers do."""

    def __init__(
        self,
        context: LayerContext,
        config: ModelConfig,
        layer: int,
        mixer: MambaMixer | PlainAttention | LayerMlp,
    ) -> None:
        self.norm = WideNorm(
            context, f"model.layers.{layer}.norm", config.hidden_size, config.rms_norm_eps
        )
        self.mixer = mixer

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        normed = self.norm(hidden)
        if isinstance(self.mixer, MambaMixer | PlainAttention):
            return hidden + self.mixer(normed, layer_pass)
        return hidden + self.mixer(normed)

    def weights(self) -> Iterator[Weight]:
        yield from self.norm.weights()
        yield from self.mixer.weights()


def build_nemotron_layer(context: LayerContext, config: ModelConfig, layer: int) -> NemotronLayer:
    """The layer of a global id."""
    nemotron = nemotron_config(config)
    name, size = f"model.layers.{layer}.mixer", config.hidden_size
    kind = nemotron.kinds[layer]
    match kind:
        case MixerKind.MAMBA:
            mamba = MambaMixer(context, nemotron.mamba, name, layer, hidden_size=size)
            return NemotronLayer(context, config, layer, mamba)
        case MixerKind.ATTENTION:
            attention = PlainAttention(context, config, layer)
            return NemotronLayer(context, config, layer, attention)
        case MixerKind.MLP:
            mlp = SquaredMlp(
                context, name, hidden_size=size, intermediate_size=config.intermediate_size
            )
            return NemotronLayer(context, config, layer, mlp)
        case MixerKind.EXPERTS:
            return NemotronLayer(context, config, layer, LatentExperts(context, name, config))
        case _:
            assert_never(kind)


class NemotronLm(CausalLm):
    """No rotations, and a last norm as the layers have them."""

    norm_type = WideNorm

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        return {}


def rename_nemotron(name: str) -> str | None:
    """Published names begin with "backbone.", those of transformers 5 with "model."."""
    if name.startswith("mtp."):
        return None
    parts = name.split(".")
    if parts[0] == "backbone":
        parts[0] = "model"
    ends = {"embeddings": "embed_tokens", "norm_f": "norm"}
    if parts[0] == "model" and parts[1] in ends:
        parts[1] = ends[parts[1]]
    if len(parts) > 4 and parts[3] == "mixer" and parts[4] in ATTENTION_PARTS:
        parts[3] = "self_attn"
    return ".".join(parts)


def nemotron_config(config: ModelConfig) -> NemotronConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, NemotronConfig), config.architecture
    return config.family


FAMILIES = {
    "NemotronHForCausalLM": Family(
        read_nemotron, build_nemotron_layer, mamba_cache, model=NemotronLm, rename=rename_nemotron
    )
}
