"""Steps that are with the workers, oldest first, and what their sequences have coming.

Workers run steps in the order in which they were sent, so the next one may be sent while another
runs, and each returns before the one behind it. Knows nothing of why a step is what it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.protocol.worker import Step, StepDone
from common.scheduling.prefix_tree import Checkpoint
from common.scheduling.sequence import Sequence

# Steps that may be with the workers: one that runs and the one that it is followed by. A third
# would only make newcomers wait longer.
IN_FLIGHT_MAX = 2


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that has not returned. sequences: all that it computes, by request id, because a
    request that comes back under the same id is another sequence. counts: tokens of each whose
    cache is there when it returns. checkpoints: that it copies, and of which sequence. copying:
    other sequences whose pages it copies."""

    step: Step
    sequences: dict[int, Sequence]
    counts: dict[int, int]
    checkpoints: list[tuple[Sequence, Checkpoint]]
    copying: list[Sequence]

    def drawn(self) -> list[Sequence]:
        """Who gets a token from it."""
        last = [chunk for chunk in self.step.chunks if chunk.is_last and not chunk.samples]
        ids = [chunk.request_id for chunk in last]
        return [self.sequences[request_id] for request_id in ids + self.step.decode]

    def owner_of(self, request_id: int) -> Sequence:
        """Whose logits a request's token was drawn from: a sample's are its prompt's."""
        for chunk in self.step.chunks:
            if request_id in chunk.drawing:
                return self.sequences[chunk.request_id]
        return self.sequences[request_id]


class InFlight:
    """Owner of `Sequence.planned_count` and `Sequence.pending_count`, and of `computed_count` while
    steps compute a sequence: one that has left is computed by the steps that it was in."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(
        self,
        step: Step,
        sequences: list[Sequence],
        checkpoints: list[tuple[Sequence, Checkpoint]],
        copying: list[Sequence],
    ) -> None:
        """A step is sent that computes these."""
        counts = {sequence.request_id: sequence.token_count for sequence in sequences}
        counts |= {chunk.request_id: chunk.stop for chunk in step.chunks}
        by_id = {sequence.request_id: sequence for sequence in sequences}
        flight = Flight(step, by_id, counts, checkpoints, copying)
        for chunk in step.chunks:
            flight.sequences[chunk.request_id].planned_count = chunk.stop
        for sequence in flight.drawn():
            sequence.pending_count += 1
        self._flights.append(flight)

    def end(self, done: StepDone) -> Flight:
        """The oldest step has returned."""
        flight = self._flights.popleft()
        assert flight.step.step_id == done.step_id, (flight.step.step_id, done.step_id)
        for sequence in flight.drawn():
            sequence.pending_count -= 1
        for request_id, sequence in flight.sequences.items():
            sequence.computed_count = flight.counts[request_id]
        for request_id, accepted in done.accepted.items():
            flight.sequences[request_id].computed_count += len(accepted.token_ids)
        return flight

    def touches(self, sequence: Sequence) -> bool:
        """Whether a step that has not returned may still read or write a sequence's pages."""
        return any(
            flight.sequences.get(sequence.request_id) is sequence or sequence in flight.copying
            for flight in self._flights
        )
