"""A layer, and its inputs in one forward pass beside the hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.cache.slots import SlotPass
from common.engine.checkpoint.weights import Weight
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.fused_rotation import AnyRotation
from common.engine.layers.sequence_rows import SequenceRows

MAIN = "main"
LOCAL = "local"
"""Names of rotations: of most layers, and of window layers that have their own."""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One forward pass as its layers see it.

    slots: states of the sequences, for layers that keep one.
    rows: which rows of the hidden states are whose, likewise.
    rotations: the angles of the batch's tokens, by the name of the rotation.
    """

    batch: ForwardBatch
    attention: AttentionPass
    slots: SlotPass
    rows: SequenceRows
    rotations: Mapping[str, AnyRotation]

    @property
    def rotation(self) -> AnyRotation:
        """Of layers that have no rotation of their own."""
        return self.rotations[MAIN]


class DecoderLayer(Protocol):
    """One layer of a family."""

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        """hidden: [T, hidden size], to the same shape."""
        ...

    def weights(self) -> Iterator[Weight]: ...
