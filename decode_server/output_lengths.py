"""How long outputs become, learned from those that there were, and what running ones may yet need.

Known of a length class: how many outputs ended of their own accord in it, and how many passed it.
Outputs that run or were cut off count up to where they came, so a few short ones that end first do
not make all others look short. What is not known yet is assumed to be long.

    reached       0    4    8   12   16   20   24   28   32   40   48   56   64   80   96 ...
    ended         |    |  1 |  9 |    |    |    |    |    |    |    |    |    |    |
    passed        | 10 | 10 |  9 |    |    |    |    |    |    |    |    |    |    |

Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Classes per doubling of the length.
CLASS_COUNT = 4
FIRST_BOUNDS = (0, 4, 8, 12)
LENGTH_MAX = 1 << 24
# Outputs are taken to be this long, or as long as they may be, until some have ended: too few
# requests at the start cost some steps, too many cost prompts that are computed again.
UNKNOWN_LENGTH = 1024
# What is not known yet weighs as much as half an output.
UNKNOWN_COUNT = 0.5
# Outputs of one class that are remembered; older ones count less and less.
REMEMBERED_COUNT = 256
# Moments at which the pages of all are added up, beside the bounds of classes.
MOMENT_COUNT = 16

Floats = NDArray[np.float64]


def _find_bounds() -> list[int]:
    bounds, start = list(FIRST_BOUNDS), 16
    while start < LENGTH_MAX:
        bounds += [start + start * part // CLASS_COUNT for part in range(CLASS_COUNT)]
        start *= 2
    return [*bounds, LENGTH_MAX]


BOUNDS = _find_bounds()


@dataclass(frozen=True, slots=True)
class Growing:
    """A request that has pages. token_count: that it has pages for; output_count: generated so far;
    left_count: that it may generate still."""

    token_count: int
    output_count: int
    left_count: int


class OutputLengths:
    """Owner of the counts, of which there is a fixed number."""

    def __init__(self) -> None:
        count = len(BOUNDS) - 1
        self._ended = [0.0] * count
        self._passed = [0.0] * count
        self._class_behind = {bound: index for index, bound in enumerate(BOUNDS[1:])}
        self._bounds = np.array(BOUNDS, float)
        self._unknown = np.array([_unknown_end_rate(index) for index in range(count)])
        self._survival: Floats | None = None

    def note_token(self, output_count: int) -> None:
        """An output has reached this length."""
        index = self._class_behind.get(output_count)
        if index is not None:
            self._passed[index] += 1
            self._fade(index)

    def note_end(self, output_count: int) -> None:
        """An output has ended, and not because it was as long as it might be."""
        index = self._class_of(output_count)
        self._ended[index] += 1
        self._fade(index)

    def note_cut(self, output_count: int) -> None:
        """An output was as long as it might be. It counts as if it had gone on for a while."""
        if output_count not in self._class_behind:
            index = self._class_of(output_count)
            self._passed[index] += 1
            self._fade(index)

    def _class_of(self, output_count: int) -> int:
        return int(np.searchsorted(self._bounds, output_count, side="right")) - 1

    def _fade(self, index: int) -> None:
        self._survival = None
        if self._ended[index] + self._passed[index] > REMEMBERED_COUNT:
            self._ended[index] /= 2
            self._passed[index] /= 2

    def expected_growth(self, growing: List[Growing]) -> int:
        """Tokens that these together have more than now, at the worst moment, where all go on as
        outputs did so far. Those that have ended by then have given theirs back."""
        if not growing:
            return 0
        tokens, reached, left = np.array(
            [(one.token_count, one.output_count, one.left_count) for one in growing], float
        ).T
        moments = self._moments(left)
        alive = self._reach(reached + moments[:, None]) / self._reach(reached)
        alive *= moments[:, None] <= left
        held = (alive * (tokens + moments[:, None])).sum(axis=1)
        return max(0, round(float(held.max() - tokens.sum())))

    def _moments(self, left: Floats) -> Floats:
        """Tokens from now: at the ends of classes, and where some are as long as they may be."""
        ordered = np.sort(left)
        ends = ordered[:: max(1, len(ordered) // MOMENT_COUNT)]
        classes = self._bounds[1 : int(np.searchsorted(self._bounds, ordered[-1]))]
        return np.concatenate((classes, ends, ordered[-1:]))

    def _reach(self, lengths: Floats) -> Floats:
        """The share of outputs that become as long as this."""
        if self._survival is None:
            ended, passed = np.array(self._ended), np.array(self._passed)
            rate = (ended + UNKNOWN_COUNT * self._unknown) / (ended + passed + UNKNOWN_COUNT)
            self._survival = np.concatenate(([1.0], np.cumprod(1 - rate)))
        return np.interp(lengths, self._bounds, self._survival)


def _unknown_end_rate(index: int) -> float:
    """Of a class that nothing is known of: how many end in it. Beyond the length that is assumed,
    half of those that are as long as this become twice as long."""
    start, stop = BOUNDS[index], BOUNDS[index + 1]
    return 0.0 if stop <= UNKNOWN_LENGTH else (stop - start) / stop
