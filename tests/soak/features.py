"""What a soak switches on beyond a plain pair, and whether counters show that it was used.

Knows nothing of processes: a server is known by its role and by the number of its process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.soak.plans import Side


class Feature(StrEnum):
    """SAMPLES: several of a prompt. RETURNS: caches of answers go back. TIER: in host memory."""

    SAMPLES = "samples"
    RETURNS = "returns"
    TIER = "tier"


# Of both servers. The tier has room for less than the larger pool, and the prompts for much more
# than both: it is soon full.
FLAGS: dict[Feature, tuple[str, ...]] = {
    Feature.RETURNS: ("--return-cache", "auto"),
    Feature.TIER: ("--host-cache-gb", "0.02"),
}


@dataclass(frozen=True, slots=True)
class Watched:
    """A counter of a server. must_rise: while it is zero, a part of the feature was not used."""

    feature: Feature
    side: Side
    name: str
    must_rise: bool = False


WATCHED = (
    Watched(Feature.RETURNS, Side.DECODE, "returns_offered"),
    Watched(Feature.RETURNS, Side.DECODE, "returns_sent", must_rise=True),
    Watched(Feature.RETURNS, Side.DECODE, "returns_failed"),
    Watched(Feature.RETURNS, Side.DECODE, "returned_tokens"),
    Watched(Feature.RETURNS, Side.PREFILL, "returns_asked"),
    Watched(Feature.RETURNS, Side.PREFILL, "returns_kept", must_rise=True),
    Watched(Feature.RETURNS, Side.PREFILL, "returns_lost"),
    *(
        watched
        for side in Side
        for watched in (
            Watched(Feature.TIER, side, "host_saved_tokens", must_rise=True),
            Watched(Feature.TIER, side, "host_loaded_tokens", must_rise=True),
            Watched(Feature.TIER, side, "host_failed_loads"),
        )
    ),
)


def flags_of(features: Collection[Feature]) -> tuple[str, ...]:
    """Flags of both servers that switch `features` on."""
    return tuple(flag for feature, flags in FLAGS.items() if feature in features for flag in flags)


@dataclass(slots=True)
class CounterLog:
    """Counters as last heard of every server process; a restarted server counts from zero again."""

    features: Collection[Feature]
    _latest: dict[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)

    def take(self, role: str, pid: int, counters: Mapping[str, float]) -> None:
        """A server that is starting says nothing yet, and is not heard."""
        if counters:
            self._latest[role, pid] = counters

    def total(self, role: str, name: str) -> float:
        """Over all processes of a role, without what they counted after they were last heard."""
        return sum(
            counters.get(name, 0.0)
            for (of_role, _), counters in self._latest.items()
            if of_role == role
        )

    def rows(self) -> list[str]:
        """A line for people per counter of the features."""
        return [
            f"{one.side:<8}{one.name:<20}{self.total(one.side, one.name):>10.0f}"
            for one in WATCHED
            if one.feature in self.features
        ]

    def unused(self) -> list[str]:
        """Counters that would not be zero if all parts of the features had been used."""
        return [
            f"{one.side} {one.name}"
            for one in WATCHED
            if one.feature in self.features and one.must_rise and not self.total(one.side, one.name)
        ]
