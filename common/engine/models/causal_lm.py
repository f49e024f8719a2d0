"""A decoder-only language model on one rank: embedding, a stage's layers, norm and head.

What a layer is made of is the family's business. Knows nothing of sampling, requests or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.attention.choose import AttentionChoice
from common.engine.cache.kv_pool import KvPool
from common.engine.cache.slots import SlotPass
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding, Head, VocabTable
from common.engine.layers.fused_rotation import AnyRotation, FusedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.matrix import describe_matrices
from common.engine.layers.norm import RmsNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.layers.sequence_rows import SequenceRows
from common.engine.models.draft import Draft, HiddenTap
from common.engine.models.layer_pass import MAIN, DecoderLayer, LayerPass
from common.engine.models.pre_norm_layer import PreNormLayer
from common.layout.parallel import split_layers


class LayerBuilder(Protocol):
    """Makes the layer of a global id."""

    def __call__(self, context: LayerContext, config: ModelConfig, layer: int) -> DecoderLayer: ...


class CausalLm:
    """The part of a model that one rank holds.

    A family whose ends differ (what is done to embeddings and logits, which rotations there are)
    overrides the methods that say so.

    config, context: what it was built from. layer_ids: global ids of this stage's layers.
    norm_type: spelling of the norm behind the last layer. draft: layers behind the last stage's
    that guess tokens, if there are any.
    """

    norm_type: ClassVar[type[RmsNorm]] = RmsNorm

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        attention: AttentionChoice,
        build_layer: LayerBuilder,
        *,
        has_draft: bool = False,
    ) -> None:
        """has_draft: whether a draft is to share its embedding."""
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
        self.rotaries = self.build_rotaries()
        embed_table = VocabTable(
            context, "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.embedding: Embedding | None = None
        self.norm: RmsNorm | None = None
        self.head: Head | None = None
        self.draft: Draft | None = None
        self._tables: list[VocabTable] = []
        if parallel.is_first_stage or (parallel.is_last_stage and has_draft):
            self.embedding = Embedding(context, embed_table)
            self._tables.append(embed_table)
        if parallel.is_last_stage:
            self.norm = self.build_norm()
            head_table = embed_table
            if not config.is_head_tied:
                head_table = VocabTable(context, "lm_head", config.vocab_size, config.hidden_size)
            self.head = Head(context, head_table)
            if head_table not in self._tables:
                self._tables.append(head_table)

    # ---- what a family may do in its own way -----------------------------------------------------

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        """The rotations that layers ask for, by name."""
        config, context = self.config, self.context
        rotary = RotaryEmbedding(
            config.rope, config.rotary_dim, device=context.device, dtype=context.dtype
        )
        return {MAIN: rotary}

    def rotate(self, batch: ForwardBatch) -> dict[str, AnyRotation]:
        """The angles of one pass, by the name that layers ask for."""
        fused, positions = self.context.fused, batch.positions
        return {
            name: rotary.rotate(positions)
            if fused is None
            else FusedRotation(rotary, positions, fused)
            for name, rotary in self.rotaries.items()
        }

    def build_norm(self) -> RmsNorm:
        """The norm behind the last layer."""
        config = self.config
        return self.norm_type(self.context, "model.norm", config.hidden_size, config.rms_norm_eps)

    def embed(self, embedding: Embedding, batch: ForwardBatch) -> Tensor:
        """Input of the first layer."""
        return embedding(batch.token_ids)

    def stage_input(self, token_count: int) -> Tensor:
        """Uninitialised, of the shape that a stage hands to the next one."""
        return self.context.empty(token_count, self.config.hidden_size)

    def finish(self, head: Head, normed: Tensor) -> Tensor:
        """Logits float32[R, vocabulary] of what the last layer made of R tokens, normed."""
        return head(normed)

    # ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        on_layer: Callable[[int], None] | None = None,
        tap: HiddenTap | None = None,
    ) -> Tensor | None:
        """Compute a batch and append what it caches to the pool.

        on_layer: called with a layer's global id once its part of the cache is complete.
        tap: takes the hidden states that a draft reads.
        Returns: logits float32[R, vocabulary] of batch.logits_rows, on every rank of the last
            pipeline stage; None on the others.
        """
        return self.compute(batch, pool, self.attention.start(batch, pool), on_layer, tap)

    def compute(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        attention: AttentionPass,
        on_layer: Callable[[int], None] | None = None,
        tap: HiddenTap | None = None,
    ) -> Tensor | None:
        """As `forward`; attention: the pass of this batch."""
        parallel = self.context.parallel
        if parallel.is_first_stage:
            assert self.embedding is not None
            hidden = self.embed(self.embedding, batch)
        else:
            hidden = parallel.receive_from_previous_stage(self.stage_input(batch.token_count))
        layer_pass = self.layer_pass(batch, pool, attention, self.rotate(batch))
        hidden, added = self._run_layers(hidden, layer_pass, on_layer, tap)
        if self.norm is None or self.head is None:
            parallel.send_to_next_stage(hidden if added is None else hidden + added)
            return None
        layer_count = self.config.layer_count
        if tap is not None:
            tap.take(layer_count, hidden, added)
        if tap is not None and layer_count + 1 in tap.layers:
            normed = self.norm(hidden if added is None else hidden + added)
            tap.put(layer_count + 1, normed)
            rows = batch.logits_rows
            return self.finish(self.head, normed if rows is None else normed[rows])
        if batch.logits_rows is not None:
            hidden = hidden[batch.logits_rows]
            added = None if added is None else added[batch.logits_rows]
        if added is None:
            return self.finish(self.head, self.norm(hidden))
        return self.finish(self.head, self.norm.after_add(hidden, added)[1])

    def layer_pass(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        attention: AttentionPass,
        rotations: Mapping[str, AnyRotation],
    ) -> LayerPass:
        """Inputs of layers in one pass, of this model's or of its draft's."""
        rows = SequenceRows(batch.query_lengths, self.context.device, frozenset(batch.state_pages))
        return LayerPass(batch, attention, SlotPass(batch, pool), rows, rotations)

    def _run_layers(
        self,
        hidden: Tensor,
        layer_pass: LayerPass,
        on_layer: Callable[[int], None] | None,
        tap: HiddenTap | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states behind the last layer, and what is still to be added to them."""
        added: Tensor | None = None
        for layer_id, layer in zip(self.layer_ids, self.layers, strict=True):
            if tap is not None:
                tap.take(layer_id, hidden, added)
            if isinstance(layer, PreNormLayer):
                hidden, added = layer.carry(hidden, added, layer_pass)
            else:
                hidden = layer(hidden if added is None else hidden + added, layer_pass)
                added = None
            if on_layer is not None:
                on_layer(layer_id)
        return hidden, added

    def describe(self) -> dict[str, str]:
        """The running model, for the log and /server_info."""
        parallel = self.context.parallel
        return {
            "architecture": self.config.architecture,
            "dtype": self.config.dtype,
            "device": str(self.context.device),
            "attention": f"{self.attention.name}: {self.attention_reason}",
            "weights": describe_matrices(self.context.matrices),
            "layers": f"{self.layer_ids.start}..{self.layer_ids.stop - 1}",
            "tp": f"{parallel.tp_rank} of {parallel.tp_size}",
            "pp": f"{parallel.pp_rank} of {parallel.pp_size}",
            "draft": "none" if self.draft is None else self.draft.config.algorithm,
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
