"""The two ends of a model that are as large as its vocabulary, cut over tensor parallel ranks.

A vocabulary that the ranks don't divide is padded: each rank has the same number of rows, and the
rows past the end are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.matrix import Matrix


class VocabTable:
    """This rank's rows of a [vocabulary, hidden] matrix; a tied head shares its embedding's."""

    def __init__(self, context: LayerContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self.name = name
        self.vocab_size = vocab_size
        rows_per_rank = -(-vocab_size // context.parallel.tp_size)
        first = context.parallel.tp_rank * rows_per_rank
        self.rows = range(min(first, vocab_size), min(first + rows_per_rank, vocab_size))
        self.matrix = Matrix(context.zeros(rows_per_rank, hidden_size), context.narrow)

    def weights(self) -> Iterator[Weight]:
        rows = self.matrix.rows
        shape = (self.vocab_size, rows.shape[1])
        take = (slice(self.rows.start, self.rows.stop), slice(None))
        target = rows[: len(self.rows)]
        piece = TensorSlice(f"{self.name}.weight", shape, take, target, keeper=self.matrix)
        yield Weight(((piece,),))


class Embedding:
    """Token ids int64[T] to hidden states [T, hidden]."""

    def __init__(self, context: LayerContext, table: VocabTable) -> None:
        self.parallel = context.parallel
        self.table = table
        table.matrix.keeps_rows = True

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return F.embedding(token_ids, self.table.matrix.rows)
        rows = self.table.rows
        is_elsewhere = (token_ids < rows.start) | (token_ids >= rows.stop)
        local_ids = (token_ids - rows.start).masked_fill(is_elsewhere, 0)
        hidden = F.embedding(local_ids, self.table.matrix.rows)
        return self.parallel.all_reduce(hidden.masked_fill(is_elsewhere[:, None], 0.0))


class Head:
    """Hidden states [R, hidden] to logits float32[R, vocabulary] on every rank of the stage."""

    def __init__(self, context: LayerContext, table: VocabTable) -> None:
        self.parallel = context.parallel
        self.table = table
        context.matrices.append(table.matrix)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.parallel.gather_last_dim(self.table.matrix(hidden))
        return logits[:, : self.table.vocab_size].float()
