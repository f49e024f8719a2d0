"""Layers behind a model's own that guess tokens, fed with the model's hidden states.

    position       i          i + 1        i + 2
    token          t(i)       t(i + 1)     t(i + 2)
    model          h(i)       h(i + 1)                      h(i) predicts t(i + 1)
    draft, row i   of h(i) and t(i + 1)                     predicts t(i + 2)

Row i of a draft's cache is that of h(i) and t(i + 1), so that of the last known position can't be
there before the token behind it is drawn. Guessing goes on with the draft's own states in place of
the model's: that of row i, and the guess of t(i + 2), make row i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding, Head
from common.engine.layers.fused_rotation import AnyRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import whole_linear
from common.engine.layers.norm import RmsNorm
from common.engine.logits import largest
from common.engine.models.layer_pass import DecoderLayer, LayerPass
from common.errors import ConfigError
from common.speculative import SpeculativeAlgorithm

NEXTN = SpeculativeAlgorithm.NEXTN


class HiddenTap:
    """Takes hidden states out of one forward pass, for all of its tokens.

    layers: as `DraftConfig.tapped`.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._states: dict[int, Tensor] = {}

    def take(self, layer: int, hidden: Tensor, added: Tensor | None) -> None:
        """The input of a layer, of which a part may be still to be added. It is copied: layers work
        in the memory of their inputs."""
        if layer in self.layers:
            self._states[layer] = hidden.clone() if added is None else hidden + added

    def put(self, layer: int, states: Tensor) -> None:
        """Hidden states that no layer changes any more."""
        self._states[layer] = states

    @property
    def states(self) -> Tensor:
        """[T, layers * hidden size]."""
        taken = [self._states[layer] for layer in self.layers]
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim=-1)


@dataclass(frozen=True, slots=True)
class Guess:
    """The likeliest token of each row, int64[R], and how likely it is to the draft, fp32[R]."""

    tokens: Tensor
    chances: Tensor

    @staticmethod
    def of(logits: Tensor) -> Guess:
        """logits: float32[R, vocabulary]."""
        tokens = largest(logits)
        return Guess(tokens, logits.softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1))


class Draft(Protocol):
    """The draft of a model on one rank."""

    @property
    def config(self) -> DraftConfig: ...

    def rotate(self, batch: ForwardBatch) -> dict[str, AnyRotation]:
        """The angles of one pass, by the name that its layers ask for."""
        ...

    def read(self, tapped: Tensor) -> Tensor:
        """What a `HiddenTap` has of T tokens, as states [T, hidden size]."""
        ...

    def __call__(self, states: Tensor, layer_pass: LayerPass) -> Tensor:
        """Rows of states [T, hidden size], and of the tokens behind them, which are the batch's.

        Returns: states of the same shape, to guess from and to go on with.
        """
        ...

    def guess(self, states: Tensor) -> Guess:
        """The token that follows each of R states [R, hidden size]."""
        ...

    def weights(self) -> Iterator[Weight]: ...


Rotate = Callable[[ForwardBatch], dict[str, AnyRotation]]


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """Parts of a model that its draft shares. rotate: the angles of a pass."""

    embedding: Embedding
    head: Head
    rotate: Rotate


@dataclass(frozen=True, slots=True)
class NextnNames:
    """What a checkpoint calls the parts of a layer that predicts one token more.

    state_norm, token_norm: of what is joined. join: of [token | state]. norm: behind the layer.
    """

    state_norm: str
    token_norm: str
    join: str
    norm: str


class NextnDraft:
    """Multi-token prediction: a decoder layer over [embedding | state], joined by a product.

    Embedding and head are the model's own; checkpoints that store them again store the same.
    Source: DeepSeek-V3 technical report, 2.2. One layer guesses all tokens, each from its own state
    behind its last norm.
    """

    def __init__(
        self,
        context: LayerContext,
        config: DraftConfig,
        ends: ModelEnds,
        layer: DecoderLayer,
        names: NextnNames,
        norm: type[RmsNorm] = RmsNorm,
    ) -> None:
        """norm: the spelling of its norms."""
        size, epsilon = config.model.hidden_size, config.model.rms_norm_eps
        self.config = config
        self._ends = ends
        self._layer = layer
        self._token_norm = norm(context, names.token_norm, size, epsilon)
        self._state_norm = norm(context, names.state_norm, size, epsilon)
        self._join = whole_linear(context, names.join, 2 * size, size)
        self._norm = norm(context, names.norm, size, epsilon)

    def rotate(self, batch: ForwardBatch) -> dict[str, AnyRotation]:
        return self._ends.rotate(batch)

    def read(self, tapped: Tensor) -> Tensor:
        return tapped

    def __call__(self, states: Tensor, layer_pass: LayerPass) -> Tensor:
        tokens = self._token_norm(self._ends.embedding(layer_pass.batch.token_ids))
        joined = self._join(torch.cat((tokens, self._state_norm(states)), dim=-1))
        return self._norm(self._layer(joined, layer_pass))

    def guess(self, states: Tensor) -> Guess:
        return Guess.of(self._ends.head(states))

    def weights(self) -> Iterator[Weight]:
        yield from self._token_norm.weights()
        yield from self._state_norm.weights()
        yield from self._join.weights()
        yield from self._layer.weights()
        yield from self._norm.weights()


@dataclass(frozen=True, slots=True)
class NextnFamily:
    """How a family's checkpoints predict more tokens at a time.

    read: the sizes of a model that has the layer behind its own.
    names: of its parts besides the layer, from the layer's global id. rename: a checkpoint's tensor
    name to the one that the layer asks for, likewise; None for one that is named as all others.
    norm: the spelling of its norms.
    """

    read: Callable[[ModelConfig], ModelConfig]
    names: Callable[[int], NextnNames]
    rename: Callable[[int, str], str | None] | None = None
    norm: type[RmsNorm] = RmsNorm


def read_nextn(family: NextnFamily | None, config: ModelConfig) -> DraftConfig:
    """The first of the layers that predict more tokens; the others of a checkpoint stay unused.

    Raises: ConfigError if there is none.
    """
    if family is None:
        raise ConfigError(
            f"--speculative-algorithm {NEXTN}: {config.architecture} is not served with layers "
            "that predict more tokens; NGRAM needs none"
        )
    layer = config.layer_count
    return DraftConfig(NEXTN, family.read(config), (layer,), (layer + 1,), config.vocab_size)


def with_layer(config: ModelConfig) -> ModelConfig:
    """The same model with one more layer like its last one.

    Raises: ConfigError if config.json says that there is none.
    """
    if config.extra_layer_count == 0:
        raise ConfigError(
            f"--speculative-algorithm {NEXTN}: num_nextn_predict_layers is 0: the checkpoint has "
            "no layer that predicts more tokens"
        )
    return one_layer_more(config)


def one_layer_more(config: ModelConfig) -> ModelConfig:
    """As `with_layer`, of a family whose config.json does not say."""
    moe, layer = config.moe, config.layer_count
    if moe is not None:
        moe = replace(moe, layers=(*moe.layers, layer))
    windows = (*config.windows, 0) if config.windows else ()
    return replace(config, layer_count=layer + 1, moe=moe, windows=windows)
