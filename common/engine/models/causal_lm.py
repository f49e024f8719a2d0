"""A decoder-only language model on one rank: embedding, a stage's layers, norm and head.

What a layer is made of is the family's business. Knows nothing of sampling, requests or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.attention.choose import AttentionChoice
from common.engine.forward_batch import ForwardBatch
from common.engine.kv_pool import KvPool
from common.engine.layers.embedding import Embedding, Head, VocabTable
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.norm import OffsetNorm, RmsNorm
from common.engine.layers.rotary import RotaryEmbedding, Rotation
from common.engine.model_config import ModelConfig
from common.engine.weights import Weight
from common.layout.parallel import split_layers


class DecoderLayer(Protocol):
    """One layer of a family."""

    def __call__(self, hidden: Tensor, rotation: Rotation, attention: AttentionPass) -> Tensor:
        """hidden: [T, hidden size], to the same shape."""
        ...

    def weights(self) -> Iterator[Weight]: ...


class LayerBuilder(Protocol):
    """Makes the layer of a global id; a family's only say in the model."""

    def __call__(self, context: LayerContext, config: ModelConfig, layer: int) -> DecoderLayer: ...


class CausalLm:
    """The part of a model that one rank holds.

    config, context: what it was built from. layer_ids: global ids of this stage's layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        attention: AttentionChoice,
        build_layer: LayerBuilder,
    ) -> None:
        parallel = context.parallel
        self.config = config
        self.context = context
        self.attention = attention.attention
        self.attention_reason = attention.reason
        self.layer_ids = range(
            *split_layers(config.layer_count, parallel.pp_size)[parallel.pp_rank]
        )
        self.layers: Sequence[DecoderLayer] = [
            build_layer(context, config, layer) for layer in self.layer_ids
        ]
        self.rotary = RotaryEmbedding(
            config.rope, config.rotary_dim, device=context.device, dtype=context.dtype
        )
        self.local_rotary: RotaryEmbedding | None = None
        gemma = config.gemma
        if gemma is not None and gemma.local_rope is not None:
            self.local_rotary = RotaryEmbedding(
                gemma.local_rope, config.rotary_dim, device=context.device, dtype=context.dtype
            )
        embed_table = VocabTable(
            context, "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        is_tied = config.is_head_tied
        self.embedding: Embedding | None = None
        self.norm: RmsNorm | None = None
        self.head: Head | None = None
        self._tables: list[VocabTable] = []
        if parallel.is_first_stage:
            self.embedding = Embedding(context, embed_table)
            self._tables.append(embed_table)
        if parallel.is_last_stage:
            norm = RmsNorm if gemma is None else OffsetNorm
            self.norm = norm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
            head_table = embed_table
            if not is_tied:
                head_table = VocabTable(context, "lm_head", config.vocab_size, config.hidden_size)
            self.head = Head(context, head_table)
            if head_table not in self._tables:
                self._tables.append(head_table)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: KvPool, on_layer: Callable[[int], None] | None = None
    ) -> Tensor | None:
        """Compute a batch and append its keys and values to the cache.

        on_layer: called with a layer's global id once its part of the cache is complete.
        Returns: logits float32[R, vocabulary] of batch.logits_rows, on every rank of the last
            pipeline stage; None on the others.
        """
        parallel, gemma = self.context.parallel, self.config.gemma
        if self.embedding is not None:
            hidden = self.embedding(batch.token_ids)
            if gemma is not None:
                # Models were trained with the factor rounded to the dtype of the weights.
                factor = torch.tensor(self.config.hidden_size**0.5, dtype=hidden.dtype)
                hidden = hidden * float(factor)
        else:
            hidden = parallel.receive_from_previous_stage(
                self.context.empty(batch.token_count, self.config.hidden_size)
            )
        rotation = self.rotary.rotate(batch.positions)
        rotations = dict.fromkeys(self.layer_ids, rotation)
        if gemma is not None and self.local_rotary is not None:
            rotations |= dict.fromkeys(
                gemma.local_layers, self.local_rotary.rotate(batch.positions)
            )
        attention = self.attention.start(batch, pool)
        for layer_id, layer in zip(self.layer_ids, self.layers, strict=True):
            hidden = layer(hidden, rotations[layer_id], attention)
            if on_layer is not None:
                on_layer(layer_id)
        if self.norm is None or self.head is None:
            parallel.send_to_next_stage(hidden)
            return None
        logits = self.head(self.norm(hidden[batch.logits_rows]))
        if gemma is not None and gemma.logit_softcap:
            logits = torch.tanh(logits / gemma.logit_softcap) * gemma.logit_softcap
        return logits

    def describe(self) -> dict[str, str]:
        """What runs, for the log and /server_info."""
        parallel = self.context.parallel
        return {
            "architecture": self.config.architecture,
            "dtype": self.config.dtype,
            "device": str(self.context.device),
            "attention": f"{self.attention.name}: {self.attention_reason}",
            "layers": f"{self.layer_ids.start}..{self.layer_ids.stop - 1}",
            "tp": f"{parallel.tp_rank} of {parallel.tp_size}",
            "pp": f"{parallel.pp_rank} of {parallel.pp_size}",
        }

    def weights(self) -> Iterator[Weight]:
        """Every tensor of this rank and its name in a checkpoint."""
        for table in self._tables:
            yield from table.weights()
        for layer in self.layers:
            yield from layer.weights()
        if self.norm is not None:
            yield from self.norm.weights()

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint's tensor that no weight asks for is in order here.

        Another pipeline stage's tensors, layers behind the last one, a tied head that was saved as
        well, and the rotary frequencies that old checkpoints carry.
        """
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            return True
        parts = name.split(".")
        if parts[:2] != ["model", "layers"] or not parts[2].isdecimal():
            return False
        layer = int(parts[2])
        layer_end = self.config.layer_count + self.config.extra_layer_count
        return layer < layer_end and layer not in self.layer_ids
