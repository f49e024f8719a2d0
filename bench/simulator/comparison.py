"""The results of a sweep of rates, measured and predicted, and the error between the two.

Knows nothing of servers or of how a sweep is made.
"""

from __future__ import annotations

import math

import msgspec

from bench.slo import Slo

ERROR_MAX = 0.2  # of a prediction, as a share of what is measured


class Probe(msgspec.Struct, frozen=True):
    """What one rate came to; latencies at the promise's rank."""

    rate: float
    ttft_ms: float
    itl_ms: float
    is_kept: bool


class Measured(msgspec.Struct, frozen=True):
    """shapes: name -> goodput in requests per second. probes: name -> what was tried."""

    shapes: dict[str, float]
    probes: dict[str, list[Probe]]


def goodput_of(probes: list[Probe]) -> float:
    return max((probe.rate for probe in probes if probe.is_kept), default=0.0)


def relative_error(predicted: float, measured: float) -> float:
    """Of what was measured, without sign; infinite where that is nothing and the other is not."""
    if not measured:
        return math.inf if predicted else 0.0
    return abs(predicted / measured - 1)


def print_comparison(measured: Measured, predicted: Measured, slo: Slo) -> None:
    """Goodput of every shape, then the latencies of every rate that was measured."""
    print(
        f"goodput, requests per second with TTFT p{slo.rank:g} of at most {slo.ttft_ms:g} ms and "
        f"ITL p{slo.rank:g} of at most {slo.itl_ms:g} ms"
    )
    print(f"{'':8} measured  predicted    error")
    for name, found in measured.shapes.items():
        value = predicted.shapes[name]
        error = f"{value / found - 1:+8.1%}" if found else f"{'-':>8}"
        is_near = relative_error(value, found) <= ERROR_MAX
        far = "" if is_near else f"  more than {ERROR_MAX:.0%}"
        print(f"{name:8} {found:8.2f} {value:10.2f} {error}{far}")
    print(f"\np{slo.rank:g} in ms, measured / predicted where the other sweep tried the rate too")
    print(f"{'':8}    rate          TTFT             ITL")
    for name, probes in measured.probes.items():
        by_rate = {probe.rate: probe for probe in predicted.probes[name]}
        for probe in sorted(probes, key=lambda one: one.rate):
            other = by_rate.get(probe.rate)
            ttft = f"{other.ttft_ms:.0f}" if other else "-"
            itl = f"{other.itl_ms:.1f}" if other else "-"
            print(
                f"{name:8} {probe.rate:7.2f} {probe.ttft_ms:7.0f} / {ttft:<6}"
                f"{probe.itl_ms:8.1f} / {itl:<6}"
            )
