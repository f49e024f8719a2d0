"""The layer that most families share: norm, attention, norm, MLP, each half added to its input.

Which attention and which MLP is the family's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.norm import RmsNorm
from common.engine.models.layer_pass import LayerPass


class LayerAttention(Protocol):
    """One layer's attention, projections included."""

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor: ...

    def weights(self) -> Iterator[Weight]: ...


class LayerMlp(Protocol):
    """One layer's MLP, with experts or without."""

    def __call__(self, hidden: Tensor) -> Tensor: ...

    def weights(self) -> Iterator[Weight]: ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). norm: the spelling of both norms."""

    def __init__(
        self,
        context: LayerContext,
        config: ModelConfig,
        layer: int,
        attention: LayerAttention,
        mlp: LayerMlp,
        norm: type[RmsNorm] = RmsNorm,
    ) -> None:
        name = f"model.layers.{layer}"
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention_norm = norm(context, f"{name}.input_layernorm", size, epsilon)
        self.attention = attention
        self.mlp_norm = norm(context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = mlp

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        hidden, added = self.carry(hidden, None, layer_pass)
        return hidden + added

    def carry(
        self, hidden: Tensor, added: Tensor | None, layer_pass: LayerPass
    ) -> tuple[Tensor, Tensor]:
        """The layer, of hidden states to which `added` is still to be added: its norm adds it.

        Neither may be used afterwards. Returns: hidden states and an addend likewise.
        """
        if added is None:
            normed = self.attention_norm(hidden)
        else:
            hidden, normed = self.attention_norm.after_add(hidden, added)
        attended = self.attention(normed, layer_pass)
        hidden, normed = self.mlp_norm.after_add(hidden, attended)
        return hidden, self.mlp(normed)

    def weights(self) -> Iterator[Weight]:
        yield from self.attention_norm.weights()
        yield from self.attention.weights()
        yield from self.mlp_norm.weights()
        yield from self.mlp.weights()
