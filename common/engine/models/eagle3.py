"""EAGLE-3 heads: one layer over [embedding | state] of each token, for Llama and Qwen.

Its states are made of those that leave three layers of the model; while it guesses on, of its own.
It may know only the most frequent tokens of the vocabulary. Source: arXiv 2503.01840, and the
published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.draft import DraftConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Head, VocabTable
from common.engine.layers.fused_rotation import AnyRotation, FusedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import whole_linear
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.draft import Guess, ModelEnds
from common.engine.models.eagle3_config import TAP_COUNT
from common.engine.models.gqa import GqaAttention
from common.engine.models.layer_pass import MAIN, LayerPass

HEAD_NAME = "lm_head"


class Eagle3Draft:
    """has_head: whether it has one of its own, and not the model's."""

    def __init__(
        self, context: LayerContext, config: DraftConfig, ends: ModelEnds, *, has_head: bool
    ) -> None:
        model, (layer,) = config.model, config.layer_ids
        size, epsilon = model.hidden_size, model.rms_norm_eps
        name = f"model.layers.{layer}"
        self.config = config
        self._context = context
        self._embedding = ends.embedding
        self._reduce = whole_linear(context, "fc", TAP_COUNT * size, size)
        self._token_norm = RmsNorm(context, f"{name}.input_layernorm", size, epsilon)
        self._state_norm = RmsNorm(context, f"{name}.hidden_norm", size, epsilon)
        self._attention = GqaAttention(context, model, layer, input_size=2 * size)
        self._mlp_norm = RmsNorm(context, f"{name}.post_attention_layernorm", size, epsilon)
        self._mlp = GatedMlp(
            context, f"{name}.mlp", hidden_size=size, intermediate_size=model.intermediate_size
        )
        self._norm = RmsNorm(context, "norm", size, epsilon)
        self._rotary = RotaryEmbedding(
            model.rope, model.rotary_dim, device=context.device, dtype=context.dtype
        )
        self._table: VocabTable | None = None
        self._head = ends.head
        if has_head:
            self._table = VocabTable(context, HEAD_NAME, config.vocab_size, size)
            self._head = Head(context, self._table)
        # How far each of its tokens is from that of the model.
        self._distances: Tensor | None = None
        if config.vocab_size < model.vocab_size:
            self._distances = torch.zeros(
                config.vocab_size, dtype=torch.int64, device=context.device
            )

    def rotate(self, batch: ForwardBatch) -> dict[str, AnyRotation]:
        fused, positions = self._context.fused, batch.positions
        if fused is None:
            return {MAIN: self._rotary.rotate(positions)}
        return {MAIN: FusedRotation(self._rotary, positions, fused)}

    def read(self, tapped: Tensor) -> Tensor:
        return self._reduce(tapped)

    def __call__(self, states: Tensor, layer_pass: LayerPass) -> Tensor:
        tokens = self._token_norm(self._embedding(layer_pass.batch.token_ids))
        inputs = torch.cat((tokens, self._state_norm(states)), dim=-1)
        attended = self._attention(inputs, layer_pass)
        states, normed = self._mlp_norm.after_add(states, attended)
        return states + self._mlp(normed)

    def guess(self, states: Tensor) -> Guess:
        guess = Guess.of(self._head(self._norm(states)))
        if self._distances is None:
            return guess
        return Guess(guess.tokens + self._distances[guess.tokens], guess.chances)

    @property
    def token_max(self) -> int:
        """The largest token that it can guess."""
        if self._distances is None:
            return self.config.vocab_size - 1
        own = torch.arange(len(self._distances), device=self._distances.device)
        return int((own + self._distances).max())

    def weights(self) -> Iterator[Weight]:
        yield from self._reduce.weights()
        yield from self._token_norm.weights()
        yield from self._state_norm.weights()
        yield from self._attention.weights()
        yield from self._mlp_norm.weights()
        yield from self._mlp.weights()
        yield from self._norm.weights()
        if self._table is not None:
            yield from self._table.weights()
        if self._distances is not None:
            yield Weight.indexes("d2t", self._distances, self.config.model.vocab_size)


def rename_eagle3(layer: int, name: str) -> str | None:
    """A tensor of a published head, as the draft asks for it; None for one that is not read: the
    model's embedding, and which of the model's tokens the head knows."""
    if name in ("t2d", "embed_tokens.weight", "model.embed_tokens.weight"):
        return None
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return f"model.layers.{layer}." + name.removeprefix(prefix)
    return name
