"""Whether a plan is faster through staging or put run by run, from what its link was measured at.

Pure arithmetic. Staging copies every byte twice more, in long stretches; a direct transfer pays for
every run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One connection, as measured when it was made.

    put_s: what one more run costs. bandwidth: bytes per second of one long put.
    copy_bandwidth: of gathering or scattering on this host. round_trip_s: of a slot's message and
        its credit.
    """

    put_s: float
    bandwidth: float
    copy_bandwidth: float
    round_trip_s: float

    def direct_s(self, nbytes: int, run_count: int) -> float:
        return run_count * self.put_s + nbytes / self.bandwidth

    def staged_s(self, nbytes: int) -> float:
        """Gather, put and scatter overlap where there are cores for them; here they do not."""
        return self.round_trip_s + nbytes / self.bandwidth + 2 * nbytes / self.copy_bandwidth

    def prefers_staging(self, nbytes: int, run_count: int) -> bool:
        return self.staged_s(nbytes) < self.direct_s(nbytes, run_count)

    @property
    def break_even_nbytes(self) -> float:
        """Runs shorter than this are better staged, if there are many of them."""
        return self.put_s * self.copy_bandwidth / 2

    def __str__(self) -> str:
        return (
            f"{self.put_s * 1e6:.2f} us per put, {self.bandwidth / 1e9:.2f} GB/s, copies at "
            f"{self.copy_bandwidth / 1e9:.2f} GB/s, round trip {self.round_trip_s * 1e6:.0f} us"
        )


def measured_cost(
    *,
    nbytes: int,
    one_put_s: float,
    run_count: int,
    many_puts_s: float,
    copy_bandwidth: float,
    round_trip_s: float,
) -> LinkCost:
    """From the same `nbytes` put as one run and as `run_count` runs; both end with a flush."""
    return LinkCost(
        put_s=max(many_puts_s - one_put_s, 0.0) / (run_count - 1),
        bandwidth=nbytes / max(one_put_s, 1e-9),
        copy_bandwidth=copy_bandwidth,
        round_trip_s=round_trip_s,
    )
