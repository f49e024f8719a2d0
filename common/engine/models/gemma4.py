"""Gemma 4 (text): layers whose heads differ by what they see, normalised queries, keys and values,
scores that are not scaled; experts beside the MLP, and per-layer inputs, where there are any.

A token's row carries, behind its hidden state, the inputs of all layers to come, the next one's
last: each layer takes its own off the end. So a pipeline stage is handed what its layers need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.choose import AttentionChoice
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.checkpoint.weights import Weight, text_name
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding, Head, VocabTable
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, whole_linear
from common.engine.layers.mlp import GatedMlp, gated_gelu
from common.engine.layers.moe import MoeMlp
from common.engine.layers.norm import WideNorm, normalize
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.causal_lm import CausalLm, LayerBuilder
from common.engine.models.family import Family
from common.engine.models.gemma import embed_scaled, soft_capped
from common.engine.models.gemma4_config import Gemma4Config, read_gemma4
from common.engine.models.layer_pass import LOCAL, MAIN, LayerPass
from common.layout.component import CacheComponent
from common.layout.families import CachedHeads, mixed_gqa_components

INPUT_NAMES = (
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)


class Gemma4Attention:
    """Attention of a layer, over its own cache or that of an earlier layer of its type."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        family = gemma4_config(config)
        name = f"model.layers.{layer}.self_attn"
        dim, kv_count = family.heads[layer].dim, family.heads[layer].kv_count
        heads = context.cut(config.head_count)
        self.owner = family.owners[layer]
        self.is_owner = self.owner == layer
        self.has_values = self.is_owner and layer not in family.valueless_layers
        self.rotation = LOCAL if layer in family.local_layers else MAIN
        self.rule = ScoreRule(scale=config.scores.scale)
        self.epsilon = config.rms_norm_eps
        self.head_dim = dim
        self.head_count = len(heads)
        parts = [("q_proj", config.head_count, heads)]
        if self.is_owner:
            owned = context.share(kv_count)
            parts.append(("k_proj", kv_count, owned))
            if self.has_values:
                parts.append(("v_proj", kv_count, owned))
        self.counts = [len(owned) for _, _, owned in parts]
        self.projection = ColumnLinear(
            context,
            config.hidden_size,
            [
                OutputBlock.of_units(f"{name}.{part}", count, owned, dim, config.has_qkv_bias)
                for part, count, owned in parts
            ],
        )
        self.norms = [
            WideNorm(context, f"{name}.{part}", dim, self.epsilon)
            for part in (("q_norm", "k_norm") if self.is_owner else ("q_norm",))
        ]
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=config.head_count * dim,
            output_size=config.hidden_size,
            has_bias=config.has_output_bias,
        )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        attention = layer_pass.attention
        assert isinstance(attention, SdpaPass), "scores with a rule are SDPA's"
        rotation = layer_pass.rotations[self.rotation]
        token_count = hidden.shape[0]
        heads = self.projection(hidden).view(token_count, -1, self.head_dim)
        query, *cached = torch.split(heads, self.counts, dim=1)
        query = rotation.apply(self.norms[0](query))
        if self.is_owner:
            key = rotation.apply(self.norms[1](cached[0]))
            # Without a projection of their own, values are made of the raw keys.
            value = normalize(cached[-1], self.epsilon)
            attended = attention.attend(self.owner, query, key, value, self.rule)
        else:
            attended = attention.attend_shared(self.owner, query, self.rule)
        return self.output(attended.reshape(token_count, -1))

    def weights(self) -> Iterator[Weight]:
        yield from self.projection.weights()
        for norm in self.norms:
            yield from norm.weights()
        yield from self.output.weights()


class Gemma4Experts(MoeMlp):
    """Experts that stand beside the MLP; they and their router each see the residual normalised."""

    def __init__(
        self, context: LayerContext, config: ModelConfig, moe: MoeConfig, name: str
    ) -> None:
        super().__init__(
            context,
            name,
            hidden_size=config.hidden_size,
            moe=moe,
            activation=gated_gelu,
        )
        self.epsilon = config.rms_norm_eps
        self.scale = context.empty(config.hidden_size)
        self.expert_scale = context.empty(moe.expert_count)
        self.norm = WideNorm(
            context, f"{name}.pre_feedforward_layernorm_2", config.hidden_size, self.epsilon
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, experts = self.route(hidden)
        return self.mix_experts(self.norm(hidden), shares, experts)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scaled = normalize(hidden, self.epsilon) * self.scale * self.hidden_size**-0.5
        scores = torch.softmax(F.linear(scaled, self.router), dim=-1, dtype=torch.float32)
        shares, experts = scores.topk(self.experts_per_token, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares * self.expert_scale[experts], experts

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.router.proj.weight", self.router)
        yield Weight.whole(f"{self.name}.router.scale", self.scale)
        yield Weight.whole(f"{self.name}.router.per_expert_scale", self.expert_scale)
        yield from self.expert_weights()
        yield from self.norm.weights()


class InputGate:
    """x + norm(up(gelu(down(x)) * input)): how a layer takes its input of a token in.

    It is small, so every rank computes all of it.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, name: str, size: int) -> None:
        hidden_size = config.hidden_size
        self.down = whole_linear(context, f"{name}.per_layer_input_gate", hidden_size, size)
        self.up = whole_linear(context, f"{name}.per_layer_projection", size, hidden_size)
        self.norm = WideNorm(
            context, f"{name}.post_per_layer_input_norm", hidden_size, config.rms_norm_eps
        )

    def __call__(self, hidden: Tensor, given: Tensor) -> Tensor:
        gate = F.gelu(self.down(hidden), approximate="tanh")
        return hidden + self.norm(self.up(gate * given))

    def weights(self) -> Iterator[Weight]:
        for part in (self.down, self.up, self.norm):
            yield from part.weights()


class Gemma4Layer:
    """Attention and MLP between norms, experts beside the MLP, its input, and one factor on all."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        family = gemma4_config(config)
        name, size, epsilon = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps

        def norm(part: str) -> WideNorm:
            return WideNorm(context, f"{name}.{part}", size, epsilon)

        self.size = size
        self.attention_norms = (norm("input_layernorm"), norm("post_attention_layernorm"))
        self.attention = Gemma4Attention(context, config, layer)
        self.mlp_norms = (norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm"))
        self.mlp = GatedMlp(
            context,
            f"{name}.mlp",
            hidden_size=size,
            intermediate_size=family.inner_sizes[layer],
            activation=gated_gelu,
        )
        self.experts: Gemma4Experts | None = None
        self.branch_norms: tuple[WideNorm, ...] = ()
        if config.moe is not None:
            self.experts = Gemma4Experts(context, config, config.moe, name)
            self.branch_norms = (
                norm("post_feedforward_layernorm_1"),
                norm("post_feedforward_layernorm_2"),
            )
        self.gate: InputGate | None = None
        if family.input_size:
            self.gate = InputGate(context, config, name, family.input_size)
        self.input_size = family.input_size
        self.scalar_name = f"{name}.layer_scalar"
        self.scalar = context.empty(1)

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        """hidden: [T, hidden size + input size * layers from this one on], to that without its own
        input."""
        row = hidden
        hidden = row[:, : self.size]
        before, behind = self.attention_norms
        hidden = hidden + behind(self.attention(before(hidden), layer_pass))
        before, behind = self.mlp_norms
        added = self.mlp(before(hidden))
        if self.experts is not None:
            of_mlp, of_experts = self.branch_norms
            added = of_mlp(added) + of_experts(self.experts(hidden))
        hidden = hidden + behind(added)
        if self.gate is None:
            return hidden * self.scalar
        rest, given = row[:, : -self.input_size], row[:, -self.input_size :]
        # In place, so that the inputs of the layers behind are not copied at each layer.
        torch.mul(self.gate(hidden, given), self.scalar, out=rest[:, : self.size])
        return rest

    def weights(self) -> Iterator[Weight]:
        for norm in (*self.attention_norms, *self.mlp_norms, *self.branch_norms):
            yield from norm.weights()
        yield from self.attention.weights()
        yield from self.mlp.weights()
        for part in (self.experts, self.gate):
            if part is not None:
                yield from part.weights()
        yield Weight.whole(self.scalar_name, self.scalar)


class LayerInputs:
    """Per-layer input of each token: its row of a table, and a projection of its embedding."""

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        family = gemma4_config(config)
        table, projection, norm = INPUT_NAMES
        self.size = family.input_size
        self.hidden_size = config.hidden_size
        total_size = config.layer_count * self.size
        self.table = VocabTable(context, table, family.input_vocab_size, total_size)
        self.embedding = Embedding(context, self.table)
        self.projection = whole_linear(context, projection, config.hidden_size, total_size)
        self.norm = WideNorm(context, norm, self.size, config.rms_norm_eps)

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """hidden: embeddings [T, hidden size]. Returns: [T, layers * input size], the last layer's
        first."""
        token_count = len(token_ids)
        projected = self.projection(hidden) * self.hidden_size**-0.5
        projected = self.norm(projected.view(token_count, -1, self.size))
        looked_up = embed_scaled(self.embedding, token_ids, self.size)
        given: Tensor = (projected + looked_up.view(token_count, -1, self.size)) * 2.0**-0.5
        return given.flip(1).reshape(token_count, -1)

    def weights(self) -> Iterator[Weight]:
        for part in (self.table, self.projection, self.norm):
            yield from part.weights()


class Gemma4Lm(CausalLm):
    """Scaled embeddings, with the layers' inputs behind them, two rotations, capped logits."""

    norm_type = WideNorm

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        attention: AttentionChoice,
        build_layer: LayerBuilder,
    ) -> None:
        super().__init__(config, context, attention, build_layer)
        self.inputs: LayerInputs | None = None
        if gemma4_config(config).input_size and context.parallel.is_first_stage:
            self.inputs = LayerInputs(context, config)

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        family, context = gemma4_config(self.config), self.context
        ropes = {MAIN: (self.config.rope, family.heads[-1].dim)}
        if family.local_rope is not None:
            ropes[LOCAL] = (family.local_rope, family.heads[family.local_layers[0]].dim)
        return {
            name: RotaryEmbedding(rope, dim, device=context.device, dtype=context.dtype)
            for name, (rope, dim) in ropes.items()
        }

    def embed(self, embedding: Embedding, batch: ForwardBatch) -> Tensor:
        hidden = embed_scaled(embedding, batch.token_ids, self.config.hidden_size)
        if self.inputs is None:
            return hidden
        return torch.cat((hidden, self.inputs(hidden, batch.token_ids)), dim=-1)

    def stage_input(self, token_count: int) -> Tensor:
        behind = self.config.layer_count - self.layer_ids.start
        size = self.config.hidden_size + gemma4_config(self.config).input_size * behind
        return self.context.empty(token_count, size)

    def finish(self, head: Head, normed: Tensor) -> Tensor:
        return soft_capped(head(normed), gemma4_config(self.config).logit_softcap)

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        if self.inputs is not None:
            yield from self.inputs.weights()

    def is_ignored(self, name: str) -> bool:
        """Also what only the first stage has, and projections to a cache that a layer does without,
        which checkpoints may carry all the same."""
        family = gemma4_config(self.config)
        if self.inputs is None and family.input_size and name.startswith(INPUT_NAMES):
            return True
        unused = tuple(
            f"model.layers.{layer}.self_attn.{part}"
            for layer in self.layer_ids
            if family.owners[layer] != layer
            for part in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        )
        return name.startswith(unused) or super().is_ignored(name)


def build_gemma4_layer(context: LayerContext, config: ModelConfig, layer: int) -> Gemma4Layer:
    """The layer of a global id."""
    return Gemma4Layer(context, config, layer)


def gemma4_config(config: ModelConfig) -> Gemma4Config:
    """Settings that only these layers have."""
    assert isinstance(config.family, Gemma4Config), config.architecture
    return config.family


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    family = gemma4_config(config)
    shapes = [
        CachedHeads(config.windows[layer], heads.kv_count, heads.dim)
        if family.owners[layer] == layer
        else None
        for layer, heads in enumerate(family.heads)
    ]
    return mixed_gqa_components(shapes, dtype)


_GEMMA4 = Family(read_gemma4, build_gemma4_layer, _cache, model=Gemma4Lm)
FAMILIES = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, rename=text_name),
}
