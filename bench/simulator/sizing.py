"""How many servers a workload needs: the fewest that keep what was promised, by simulation.

Every server has a card of its own. The search takes more servers to be no worse: it finds the
fewest of each kind while the other is in plenty, and goes up from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serve.outcome import Run
from bench.serve.workload import Ask
from bench.simulator.profile import Profile
from bench.simulator.simulate import own_cards, simulate
from bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Size:
    """prefill_count: 0 for single servers. ttft_ms, itl_ms: at the promise's rank."""

    prefill_count: int
    decode_count: int
    ttft_ms: float
    itl_ms: float

    @property
    def server_count(self) -> int:
        return self.prefill_count + self.decode_count


@dataclass(frozen=True, slots=True)
class Answer:
    """pairs, singles: the fewest servers, None if no count up to the limit is enough. best_pairs,
    best_singles: with as many as the limit allows, which says what is missing then."""

    pairs: Size | None
    singles: Size | None
    best_pairs: Size
    best_singles: Size


class Sizing:
    """One question: simulates each count once."""

    def __init__(self, profile: Profile, asks: Sequence[Ask], slo: Slo, count_max: int) -> None:
        assert count_max >= 1
        self._profile = profile
        self._asks = asks
        self._slo = slo
        self._count_max = count_max
        self._tried: dict[tuple[int, int], tuple[Size, bool]] = {}

    def answer(self) -> Answer:
        """count_max bounds the servers of each kind."""
        most = self._count_max
        return Answer(
            self._fewest_pairs(),
            self._fewest_singles(),
            self._size(most, most),
            self._size(0, most),
        )

    def _fewest_singles(self) -> Size | None:
        count = fewest(lambda n: self._is_kept(0, n), self._count_max)
        return None if count is None else self._size(0, count)

    def _fewest_pairs(self) -> Size | None:
        most = self._count_max
        prefill_min = fewest(lambda n: self._is_kept(n, most), most)
        decode_min = fewest(lambda n: self._is_kept(most, n), most)
        if prefill_min is None or decode_min is None:
            return None
        for total in range(prefill_min + decode_min, 2 * most + 1):
            kept = [
                self._size(prefill_count, total - prefill_count)
                for prefill_count in range(prefill_min, total - decode_min + 1)
                if prefill_count <= most
                and total - prefill_count <= most
                and self._is_kept(prefill_count, total - prefill_count)
            ]
            if kept:  # of equally many, the ones with the most to spare
                return min(kept, key=self._strain)
        return None

    def _strain(self, size: Size) -> float:
        return max(size.ttft_ms / self._slo.ttft_ms, size.itl_ms / self._slo.itl_ms)

    def _size(self, prefill_count: int, decode_count: int) -> Size:
        return self._try(prefill_count, decode_count)[0]

    def _is_kept(self, prefill_count: int, decode_count: int) -> bool:
        return self._try(prefill_count, decode_count)[1]

    def _try(self, prefill_count: int, decode_count: int) -> tuple[Size, bool]:
        key = (prefill_count, decode_count)
        if key not in self._tried:
            run: Run = simulate(self._profile, own_cards(*key), self._asks)
            ttft_ms, itl_ms = self._slo.found_ms(self._slo.summarize(run))
            size = Size(prefill_count, decode_count, ttft_ms, itl_ms)
            self._tried[key] = size, self._slo.is_kept(run)
        return self._tried[key]


def fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """The least of 1..most that is enough, if more is never less; None if `most` is not."""
    high = 1
    while not is_enough(high):
        if high == most:
            return None
        high = min(2 * high, most)
    low = high // 2  # not enough, or zero
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
