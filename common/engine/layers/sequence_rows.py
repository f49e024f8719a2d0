"""Which rows of a ragged batch belong to which sequence, for layers that carry a state along.

Made once per forward pass. Each index is computed on first use. All index tensors are on the
model's device. Knows nothing of positions, pages or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.engine.host_copy import upload


class SequenceRows:
    """Sequences that lie one after the other: lengths[b] rows of sequence b.

    continued: of these b, sequence b + 1 begins with the state that sequence b ends with.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        continued: Collection[int] = frozenset(),
    ) -> None:
        assert lengths and min(lengths) >= 1, lengths
        self.lengths = tuple(lengths)
        self.device = device
        self._continued = continued
        self._chunks: dict[int, RowChunks] = {}
        self._padded: dict[int, PaddedRows] = {}

    @property
    def is_single(self) -> bool:
        """Whether every sequence has one row and begins with a state that is known before."""
        return max(self.lengths) == 1 and not self._continued

    @cached_property
    def rounds(self) -> tuple[SequencePart, ...]:
        """All sequences, those that go on from others in a later part than these; none if no
        sequence does."""
        if not self._continued:
            return ()
        numbers = [0] * len(self.lengths)
        for b in sorted(self._continued):
            numbers[b + 1] = numbers[b] + 1
        rounds: list[SequencePart] = []
        for number in range(max(numbers) + 1):
            chosen = [b for b, of_b in enumerate(numbers) if of_b == number]
            part = self._part(chosen)
            if number:
                (before,) = upload(self.device, np.array(chosen, dtype=np.int64) - 1)
                part = replace(part, before=before)
            rounds.append(part)
        return tuple(rounds)

    @cached_property
    def by_length(self) -> tuple[SequencePart, ...]:
        """Sequences of one row, and those of more; none if all are of one kind."""
        singles = [b for b, length in enumerate(self.lengths) if length == 1]
        longer = [b for b, length in enumerate(self.lengths) if length > 1]
        return (self._part(singles), self._part(longer)) if singles and longer else ()

    @cached_property
    def starts(self) -> Tensor:
        """int64[B + 1], rows of each sequence: starts[b] .. starts[b + 1]."""
        return upload(self.device, self.host_starts.numpy())[0]

    @cached_property
    def host_starts(self) -> Tensor:
        """The same on the CPU."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def padded(self, front: int) -> PaddedRows:
        """The batch with `front` more rows before every sequence."""
        if front not in self._padded:
            self._padded[front] = self._pad(front)
        return self._padded[front]

    def chunks(self, size: int) -> RowChunks:
        """Every sequence cut into chunks of `size` rows."""
        if size not in self._chunks:
            self._chunks[size] = self._cut(size)
        return self._chunks[size]

    # ----------------------------------------------------------------------------------------------

    @cached_property
    def _sequence_of_row(self) -> Tensor:
        return torch.repeat_interleave(
            torch.arange(len(self.lengths)), torch.tensor(self.lengths), output_size=self._row_count
        )

    @property
    def _row_count(self) -> int:
        return sum(self.lengths)

    def _part(self, chosen: list[int]) -> SequencePart:
        """Some of the sequences, not all."""
        sequences = torch.tensor(chosen)
        is_chosen = torch.zeros(len(self.lengths), dtype=torch.bool)
        is_chosen[sequences] = True
        rows = is_chosen[self._sequence_of_row].nonzero()[:, 0]
        inner = SequenceRows([self.lengths[b] for b in chosen], self.device)
        return SequencePart(inner, *upload(self.device, sequences.numpy(), rows.numpy()))

    def _pad(self, front: int) -> PaddedRows:
        # length 3 and 1, front 2:   f f r r r | f f r        the last two are the back
        rows = torch.arange(self._row_count) + (self._sequence_of_row + 1) * front
        firsts = self.host_starts[:-1] + torch.arange(len(self.lengths)) * front
        ends = firsts + torch.tensor(self.lengths) + front
        step = torch.arange(front)
        fronts, backs = firsts[:, None] + step, ends[:, None] - front + step
        uploaded = upload(self.device, rows.numpy(), fronts.numpy(), backs.numpy())
        return PaddedRows(self._row_count + front * len(self.lengths), *uploaded)

    def _cut(self, size: int) -> RowChunks:
        # lengths 5, 9, 2 in chunks of 4, the longest first:
        #   wave 0: b0 b1 b2 of sequence 1, 0, 2    wave 1: of 1, 0    wave 2: of 1
        lengths = torch.tensor(self.lengths)
        counts = (lengths + size - 1) // size
        order = torch.argsort(-counts, stable=True)
        place_of_sequence = torch.empty_like(order)
        place_of_sequence[order] = torch.arange(len(order))
        widths = [int((counts > wave).sum()) for wave in range(int(counts.max()))]
        firsts = torch.tensor([0, *widths]).cumsum(0)
        offsets = torch.arange(self._row_count) - self.host_starts[self._sequence_of_row]
        wave = offsets // size
        chunk = firsts[wave] + place_of_sequence[self._sequence_of_row]
        bounds = firsts.tolist()
        places, device_order = upload(
            self.device, (chunk * size + offsets % size).numpy(), order.numpy()
        )
        return RowChunks(
            size=size,
            places=places,
            order=device_order,
            waves=tuple(slice(*pair) for pair in pairwise(bounds)),
        )


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Some sequences of a batch, as a batch of their own.

    sequences, rows: int64, which ones of the whole batch. before: int64, from the states of which
    ones of the whole batch they go on; None if theirs are known.
    """

    inner: SequenceRows
    sequences: Tensor
    rows: Tensor
    before: Tensor | None = None

    def take_rows(self, values: Tensor) -> Tensor:
        return values[self.rows]


class RowInputs(Protocol):
    """Inputs of a recurrence, by row."""

    def take(self, part: SequencePart) -> Self: ...


InputsT = TypeVar("InputsT", bound=RowInputs)


def apply_by_length(
    step: Callable[[InputsT, Tensor], tuple[Tensor, Tensor]],
    run: Callable[[InputsT, SequenceRows, Tensor], tuple[Tensor, Tensor]],
    inputs: InputsT,
    rows: SequenceRows,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """A recurrence over a ragged batch: sequences of one row in one step, the others at length.

    states: [B, ..] before the first row of each sequence.
    Returns: as both `step` and `run` do, (outputs [T, ..], states after the last row of each
        sequence, like those before).
    """
    if rows.is_single:
        return step(inputs, states)
    parts = rows.rounds or rows.by_length
    if not parts:
        return run(inputs, rows, states)
    outputs: Tensor | None = None
    after = torch.empty_like(states)
    for part in parts:
        before = states[part.sequences] if part.before is None else after[part.before]
        part_outputs, after[part.sequences] = apply_by_length(
            step, run, inputs.take(part), part.inner, before
        )
        if outputs is None:
            outputs = part_outputs.new_empty(sum(rows.lengths), *part_outputs.shape[1:])
        outputs[part.rows] = part_outputs
    assert outputs is not None
    return outputs, after


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Where the rows of a padded batch are.

    rows: int64[T] of the batch's own. fronts: int64[B, front] of the rows put before each sequence.
    backs: int64[B, front] of the last ones of each sequence, which reach into its front if the
    sequence is shorter.
    """

    count: int
    rows: Tensor
    fronts: Tensor
    backs: Tensor


@dataclass(frozen=True, slots=True)
class RowChunks:
    """Chunks of equal size, numbered so that what can be computed side by side is one slice.

    places: int64[T], where each row is among chunk number * size + row in the chunk.
    order: int64[B], sequences by their number of chunks, most first.
    waves: wave i holds chunk i of the first sequences of `order`, as many as have one.
    """

    size: int
    places: Tensor
    order: Tensor
    waves: tuple[slice, ...]

    @property
    def count(self) -> int:
        stop: int = self.waves[-1].stop
        return stop

    def pack(self, values: Tensor) -> Tensor:
        """[T, ...] to [chunk, size, ...], zero where no row is."""
        packed = values.new_zeros(self.count * self.size, *values.shape[1:])
        packed.index_copy_(0, self.places, values)
        return packed.view(self.count, self.size, *values.shape[1:])

    def unpack(self, packed: Tensor) -> Tensor:
        """[chunk, size, ...] to [T, ...]."""
        return packed.flatten(0, 1)[self.places]
