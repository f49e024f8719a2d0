"""Linear layers cut over tensor parallel ranks, by output rows or by input columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.layers.layer_context import LayerContext


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """A projection of the checkpoint and the output rows of it that this rank computes.

    name: of the projection, without ".weight". size: its rows in the whole model.
    """

    name: str
    size: int
    rows: range
    has_bias: bool = False

    @staticmethod
    def of_units(
        name: str, count: int, owned: range, dim: int, has_bias: bool = False
    ) -> OutputBlock:
        """`dim` rows of each unit (a head, a group); count: of units in the whole model."""
        return OutputBlock(name, count * dim, features_of(owned, dim), has_bias)

    @staticmethod
    def whole(name: str, size: int, has_bias: bool = False) -> OutputBlock:
        """All rows, on every rank."""
        return OutputBlock(name, size, range(size), has_bias)


class ColumnLinear:
    """y = x W^T + b, the rows of W cut; several projections of one input are one matrix product.

    The output holds the blocks side by side, this rank's rows only; no communication.
    is_read: whether others read `rows`, and this product is never made.
    """

    def __init__(
        self,
        context: LayerContext,
        input_size: int,
        blocks: Sequence[OutputBlock],
        *,
        is_read: bool = False,
    ) -> None:
        self.input_size = input_size
        self.blocks = tuple(blocks)
        output_size = sum(len(block.rows) for block in blocks)
        self._matrix = context.matrix(output_size, input_size, is_read=is_read)
        has_bias = any(block.has_bias for block in blocks)
        self.bias = context.zeros(output_size) if has_bias else None

    @property
    def rows(self) -> Tensor:
        """W."""
        return self._matrix.rows

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._matrix(hidden, self.bias)

    def weights(self) -> Iterator[Weight]:
        first = 0
        for block in self.blocks:
            target = slice(first, first + len(block.rows))
            rows = slice(block.rows.start, block.rows.stop)
            yield Weight(
                (
                    (
                        TensorSlice(
                            f"{block.name}.weight",
                            (block.size, self.input_size),
                            (rows, slice(None)),
                            self.rows[target],
                            keeper=self._matrix,
                        ),
                    ),
                )
            )
            if block.has_bias:
                assert self.bias is not None
                piece = TensorSlice(f"{block.name}.bias", (block.size,), (rows,), self.bias[target])
                yield Weight(((piece,),))
            first = target.stop


class RowLinear:
    """y = x W^T + b, the columns of W cut evenly: each rank has a part of x, the sum is shared.

    The bias is added once, after the reduction.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        input_size: int,
        output_size: int,
        has_bias: bool = False,
    ) -> None:
        self.name = name
        self.input_size = input_size
        self.columns = context.cut(input_size)
        self.parallel = context.parallel
        self._matrix = context.matrix(output_size, len(self.columns))
        self.bias = context.empty(output_size) if has_bias else None

    def __call__(self, hidden_part: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return self._matrix(hidden_part, self.bias)
        hidden = self.parallel.all_reduce(self._matrix(hidden_part))
        return hidden if self.bias is None else hidden + self.bias

    def weights(self) -> Iterator[Weight]:
        columns = slice(self.columns.start, self.columns.stop)
        rows = self._matrix.rows
        shape = (len(rows), self.input_size)
        take = (slice(None), columns)
        piece = TensorSlice(f"{self.name}.weight", shape, take, rows, keeper=self._matrix)
        yield Weight(((piece,),))
        if self.bias is not None:
            yield Weight.whole(f"{self.name}.bias", self.bias)


def whole_linear(
    context: LayerContext, name: str, input_size: int, output_size: int, has_bias: bool = False
) -> ColumnLinear:
    """A projection that every rank computes all of."""
    return ColumnLinear(context, input_size, [OutputBlock.whole(name, output_size, has_bias)])


def features_of(units: range, dim: int) -> range:
    """The features of consecutive units of `dim` each."""
    return range(units.start * dim, units.stop * dim)


def shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
