"""Qwen3-Next and Qwen3.5: most layers recur, every few attend with gated outputs.

MLPs are plain, or experts with one more beside them that every token takes by as much as it asks
for. Which layer is what, and how projections are stored, are values of `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight, text_name
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.layers.choose_delta import choose_delta_kernels
from common.engine.layers.conv_step import ConvShape, choose_conv
from common.engine.layers.expert_order import Beside
from common.engine.layers.gated_norm_fla import GatedNormShape, choose_gated_norm
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.moe import MoeMlp
from common.engine.layers.norm import OffsetNorm, OffsetQkNorm
from common.engine.models.causal_lm import CausalLm
from common.engine.models.draft import NextnFamily, NextnNames, one_layer_more
from common.engine.models.family import Family, gqa_cache
from common.engine.models.gated_delta_net import GatedDeltaNet, delta_config, delta_shape
from common.engine.models.gqa import GqaAttention
from common.engine.models.layer_pass import LayerPass
from common.engine.models.pre_norm_layer import LayerAttention, LayerMlp, PreNormLayer
from common.engine.models.qwen3_next_config import read_qwen3_next
from common.layout.component import CacheComponent
from common.layout.families import gated_delta_components


class GatedAttention(GqaAttention):
    """`GqaAttention` with its output times the sigmoid of a gate of every feature.

    q_proj holds [query | gate] of every head.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        super().__init__(context, config, layer, query_parts=2, norm=OffsetQkNorm)

    def mix(self, heads: Tensor, layer_pass: LayerPass) -> Tensor:
        query_gate, key_value = heads.split_with_sizes(
            [2 * self.head_count, 2 * self.kv_head_count], dim=1
        )
        query, gate = query_gate[:, 0::2], query_gate[:, 1::2]
        attended = super().mix(torch.cat((query, key_value), dim=1), layer_pass)
        return attended * gate.sigmoid()


class SharedMoeMlp(MoeMlp):
    """Routed experts, and an MLP that every token takes, times the sigmoid of its own score."""

    def __init__(
        self, context: LayerContext, name: str, *, hidden_size: int, moe: MoeConfig
    ) -> None:
        super().__init__(context, name, hidden_size=hidden_size, moe=moe)
        self.shared = GatedMlp(
            context,
            f"{name}.shared_expert",
            hidden_size=hidden_size,
            intermediate_size=moe.shared_size,
        )
        self.shared_gate = context.empty(1, hidden_size)

    def beside(self, hidden: Tensor) -> Beside:
        return Beside(self.shared(hidden), F.linear(hidden, self.shared_gate))

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self.shared.weights()
        yield Weight.whole(f"{self.name}.shared_expert_gate.weight", self.shared_gate)


def build_qwen3_next_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id."""
    name, size = f"model.layers.{layer}.mlp", config.hidden_size
    mixer: LayerAttention
    if layer in delta_config(config).linear_layers:
        mixer = GatedDeltaNet(context, config, layer)
    else:
        mixer = GatedAttention(context, config, layer)
    mlp: LayerMlp
    if config.moe is not None and layer in config.moe.layers:
        mlp = SharedMoeMlp(context, name, hidden_size=size, moe=config.moe)
    else:
        mlp = GatedMlp(context, name, hidden_size=size, intermediate_size=config.intermediate_size)
    return PreNormLayer(context, config, layer, mixer, mlp, norm=OffsetNorm)


class Qwen3NextLm(CausalLm):
    """The last norm's weight is an offset, too."""

    norm_type = OffsetNorm

    def describe(self) -> dict[str, str]:
        delta, context = delta_config(self.config), self.context
        rule = choose_delta_kernels(delta_shape(self.config, context))
        conv = choose_conv(ConvShape(delta.kernel_size, False, context.dtype, context.device))
        norm = choose_gated_norm(GatedNormShape(delta.value_dim, context.dtype, context.device))
        return super().describe() | {
            "delta rule": f"{rule.kernels.name}: {rule.reason}",
            "short convolution": f"{'triton' if conv.step else 'torch'}: {conv.reason}",
            "gated norm": f"{'fla' if norm.kernel else 'torch'}: {norm.reason}",
        }


def rename_qwen3_next(name: str) -> str | None:
    """A name in a checkpoint, of a composite or not, as layers ask for it."""
    if name.startswith("mtp."):
        # Layers that predict more tokens at a time.
        return None
    is_plain = name.startswith(("model.layers.", "model.embed_tokens.", "model.norm."))
    return name if is_plain else text_name(name)


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
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
        replace(component, layers=tuple(attention_layers)) for component in gqa_cache(config, dtype)
    )
    return (*keys_values, *slots)


_MTP_LAYER = "mtp.layers.0."
_MTP_NAMES = NextnNames(
    state_norm="mtp.pre_fc_norm_hidden",
    token_norm="mtp.pre_fc_norm_embedding",
    join="mtp.fc",
    norm="mtp.norm",
)


def _rename_mtp(layer: int, name: str) -> str | None:
    if name.startswith(_MTP_LAYER):
        return f"model.layers.{layer}." + name.removeprefix(_MTP_LAYER)
    is_ours = name.startswith(("mtp.fc.", "mtp.norm.", "mtp.pre_fc_norm_"))
    return name if is_ours else None


_QWEN3_NEXT = Family(
    read_qwen3_next,
    build_qwen3_next_layer,
    _cache,
    model=Qwen3NextLm,
    rename=rename_qwen3_next,
    nextn=NextnFamily(one_layer_more, lambda layer: _MTP_NAMES, _rename_mtp, OffsetNorm),
)
FAMILIES = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_NEXT,
}
