"""Whether a plan is faster through staging or put run by run, from measured prices.

Pure arithmetic. A direct transfer pays for every run. A staged one pays for every slot that it
fills, and copies every byte twice more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Gathering or scattering one piece, as measured on a device.

    piece_s: fixed cost of a piece: indexes, launches and, on a GPU, waiting for the stream.
    bandwidth: bytes per second of the rest of a larger piece's time.
    """

    piece_s: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.piece_s * 1e6:.0f} us + {self.bandwidth / 1e9:.2f} GB/s"


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Of a piece into its slot and out of it again."""

    gather: CopyCost
    scatter: CopyCost

    @property
    def piece_s(self) -> float:
        return self.gather.piece_s + self.scatter.piece_s

    @property
    def s_per_byte(self) -> float:
        return 1 / self.gather.bandwidth + 1 / self.scatter.bandwidth


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One connection and the copies at its ends, as measured before it is used.

    put_s: cost of one more run. bandwidth: bytes per second of one long put.
    slot_nbytes: the largest piece. round_trip_s: of SlotFilled and its SlotFreed.
    """

    put_s: float
    bandwidth: float
    slot_nbytes: int
    copies: CopyCosts
    round_trip_s: float

    def direct_s(self, nbytes: int, run_count: int) -> float:
        return run_count * self.put_s + nbytes / self.bandwidth

    def staged_s(self, nbytes: int) -> float:
        """Slots overlap where there are cores for it; here they follow each other."""
        slot_count = -(-nbytes // self.slot_nbytes)
        return slot_count * self.slot_s + nbytes / self.bandwidth + nbytes * self.copies.s_per_byte

    def prefers_staging(self, nbytes: int, run_count: int) -> bool:
        return self.staged_s(nbytes) < self.direct_s(nbytes, run_count)

    @property
    def slot_s(self) -> float:
        """Fixed cost of a slot, whatever its bytes; without its put."""
        return self.copies.piece_s + self.round_trip_s

    @property
    def break_even_nbytes(self) -> float:
        """Runs shorter than this are better staged, if there are many of them."""
        return self.put_s / (self.slot_s / self.slot_nbytes + self.copies.s_per_byte)

    def __str__(self) -> str:
        return (
            f"{self.put_s * 1e6:.2f} us per put, {self.bandwidth / 1e9:.2f} GB/s; slots of "
            f"{self.slot_nbytes >> 10} KiB: gather {self.copies.gather}, scatter "
            f"{self.copies.scatter}, round trip {self.round_trip_s * 1e6:.0f} us"
        )


def measured_cost(
    *,
    slot_nbytes: int,
    one_put_s: float,
    run_count: int,
    many_puts_s: float,
    copies: CopyCosts,
    round_trip_s: float,
) -> LinkCost:
    """From a slot put as one run and as `run_count` runs; both end with a flush."""
    return LinkCost(
        put_s=max(many_puts_s - one_put_s, 0.0) / (run_count - 1),
        bandwidth=slot_nbytes / max(one_put_s, SHORTEST_S),
        slot_nbytes=slot_nbytes,
        copies=copies,
        round_trip_s=round_trip_s,
    )


def measured_copy(*, least_s: float, nbytes: int, full_s: float) -> CopyCost:
    """From the copies of a piece of next to nothing and of one of `nbytes`."""
    return CopyCost(least_s, nbytes / max(full_s - least_s, SHORTEST_S))


SHORTEST_S = 1e-9
"""Stands for a time that a clock can't tell from none."""
