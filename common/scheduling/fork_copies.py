"""Copies of pages that the next step makes because sequences have been forked.

    step N         computes the prompt, or its cache arrives
    step N + 1     copies the pages that can't be shared, before it writes any of them

Knows nothing of why sequences fork.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.protocol.worker import PageCopies
from common.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Fork:
    """source: whose pages are copied. copies: per sequence that they become."""

    source: Sequence
    copies: dict[int, tuple[Sequence, list[PageCopies]]] = field(default_factory=dict)


class ForkCopies:
    """Forks that no step has copied yet."""

    def __init__(self) -> None:
        self._forks: list[_Fork] = []

    def add(self, source: Sequence, targets: list[tuple[Sequence, list[PageCopies]]]) -> None:
        """Pages of `source` are copied to others', each with what it takes."""
        if targets:
            copies = {target.request_id: (target, needed) for target, needed in targets}
            self._forks.append(_Fork(source, copies))

    def is_source(self, sequence: Sequence) -> bool:
        """Whether a sequence has to keep its pages until the next step has returned."""
        return any(fork.source is sequence for fork in self._forks)

    def drop(self, sequence: Sequence) -> bool:
        """A sequence has left. Whether no step has copied its pages, which then hold nothing."""
        for fork in list(self._forks):
            target, _ = fork.copies.get(sequence.request_id, (None, []))
            if target is not sequence:
                continue
            del fork.copies[sequence.request_id]
            if not fork.copies:
                self._forks.remove(fork)
            return True
        return False

    def take(self) -> tuple[list[PageCopies], list[Sequence]]:
        """What the next step copies, and the sequences that it reads or writes for that."""
        forks, self._forks = self._forks, []
        copies: list[PageCopies] = []
        touched: list[Sequence] = []
        for fork in forks:
            touched.append(fork.source)
            for target, needed in fork.copies.values():
                copies += needed
                touched.append(target)
        return copies, touched
