"""Common arguments of all layers: the rank's place, the device and the dtype of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.engine.layers.expert_matrix import ExpertMatrix
from common.engine.layers.fused_kinds import AnyKernels
from common.engine.layers.matrix import Matrix, Multiplied
from common.engine.layers.narrow import NarrowWeights
from common.engine.layers.stored_experts import Scratch
from common.layout.component import Shard
from common.layout.parallel import units_of_rank


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Shared by all layers of a model.

    fused: kernels for their small functions, None if they are spelled out. narrow: quantised
    weights that stay as they are stored. matrices: those that products are made with; they are
    packed once all are filled. scratch: where experts' weights are made wide.
    """

    parallel: ParallelContext
    device: torch.device
    dtype: torch.dtype
    fused: AnyKernels | None = None
    narrow: NarrowWeights = NarrowWeights.WIDE
    matrices: list[Multiplied] = field(default_factory=list)
    scratch: Scratch = field(default_factory=Scratch)

    def empty(self, *shape: int) -> Tensor:
        """A tensor to be filled by the loader."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_fp32(self, *shape: int) -> Tensor:
        """As `empty`, for a tensor that is too delicate for the model's dtype."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """A tensor whose rows may stay unfilled (the padding of a vocabulary)."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def matrix(self, output_size: int, input_size: int, *, is_read: bool = False) -> Matrix:
        """A weight to be filled by the loader. is_read: by rows, and no product is made with it."""
        may_stay = self.narrow != NarrowWeights.WIDE and not is_read
        device = torch.device("meta") if may_stay else self.device
        rows = torch.empty(output_size, input_size, dtype=self.dtype, device=device)
        matrix = Matrix(rows, self.narrow, self.device)
        matrix.keeps_rows = is_read
        if not is_read:
            self.matrices.append(matrix)
        return matrix

    def expert_matrix(self, count: int, output_size: int, input_size: int) -> ExpertMatrix:
        """The weights of all experts of a layer, to be filled by the loader."""
        may_stay = self.narrow != NarrowWeights.WIDE
        device = torch.device("meta") if may_stay else self.device
        rows = torch.empty(count, output_size, input_size, dtype=self.dtype, device=device)
        matrix = ExpertMatrix(rows, self.narrow, self.device, self.scratch)
        self.matrices.append(matrix)
        return matrix

    def cut(self, size: int) -> range:
        """This rank's share of `size` features that all ranks share evenly."""
        share, rest = divmod(size, self.parallel.tp_size)
        assert rest == 0, (size, self.parallel.tp_size)
        return range(self.parallel.tp_rank * share, (self.parallel.tp_rank + 1) * share)

    def share(self, unit_count: int) -> range:
        """This rank's units (KV heads, groups) by the cache's rule: consecutive ranks share one if
        there are fewer units than ranks."""
        return units_of_rank(unit_count, Shard.SPLIT, self.parallel.tp_size, self.parallel.tp_rank)
