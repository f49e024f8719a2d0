"""Inputs of every layer of one forward pass, beside the hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.engine.attention.attention import AttentionPass
from common.engine.cache.slots import SlotPass
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
