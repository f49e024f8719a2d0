"""What a soak switches on beyond a plain pair, and whether counters show that it was used.

Knows nothing of processes: a server is known by its role and by the number of its process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.soak.plans import Side


class Feature(StrEnum):
    """SAMPLES: several of a prompt. RETURNS: caches of answers go back. TIER: in host memory."""

    SAMPLES = "samples"
    RETURNS = "returns"
    TIER = "tier"


# Flags of both servers. With these prompts the tier has room for about what the smaller pool holds
# and is full within a minute or two, so that what it keeps leaves it, too.
FLAGS: dict[Feature, tuple[str, ...]] = {
    Feature.SAMPLES: (),
    Feature.RETURNS: ("--return-cache", "auto"),
    Feature.TIER: ("--host-cache-gb", "0.02"),
}
_RETURNS_SENT = (Side.DECODE, "returns_sent")
_RETURNS_KEPT = (Side.PREFILL, "returns_kept")
_TIER = tuple((side, name) for side in Side for name in ("host_saved_tokens", "host_loaded_tokens"))
# Zero at the end of a long run: the feature was not used. The others are only shown.
USED: dict[Feature, tuple[tuple[Side, str], ...]] = {
    Feature.SAMPLES: (),
    Feature.RETURNS: (_RETURNS_SENT, _RETURNS_KEPT),
    Feature.TIER: _TIER,
}
SHOWN: dict[Feature, tuple[tuple[Side, str], ...]] = {
    Feature.SAMPLES: (),
    Feature.RETURNS: (
        (Side.DECODE, "returns_offered"),
        (Side.DECODE, "returns_failed"),
        (Side.DECODE, "returned_tokens"),
        (Side.PREFILL, "returns_asked"),
        (Side.PREFILL, "returns_lost"),
    ),
    Feature.TIER: tuple((side, "host_failed_loads") for side in Side),
}


def flags_of(features: Iterable[Feature]) -> tuple[str, ...]:
    """Flags of both servers that switch `features` on."""
    return tuple(flag for feature in Feature if feature in features for flag in FLAGS[feature])


@dataclass(slots=True)
class CounterLog:
    """Counters as heard last of every server process, which count from zero when it is restarted."""

    _latest: dict[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)

    def take(self, role: str, pid: int, counters: Mapping[str, float]) -> None:
        """A server that is starting says nothing yet, and is not heard."""
        if counters:
            self._latest[role, pid] = counters

    def total(self, role: str, name: str) -> float:
        """Over all processes of a role, but for what they counted since they were heard last."""
        return sum(
            counters.get(name, 0.0)
            for (of_role, _), counters in self._latest.items()
            if of_role == role
        )

    def rows(self, features: Iterable[Feature]) -> list[str]:
        """For people: a line per counter."""
        chosen = [one for feature in Feature if feature in features for one in _shown(feature)]
        return [f"{side:<8}{name:<20}{self.total(side, name):>10.0f}" for side, name in chosen]

    def unused(self, features: Iterable[Feature]) -> list[str]:
        """Counters of `features` that are zero and would not be if all of it was used."""
        chosen = [one for feature in Feature if feature in features for one in USED[feature]]
        return [f"{side} {name}" for side, name in chosen if not self.total(side, name)]


def _shown(feature: Feature) -> tuple[tuple[Side, str], ...]:
    return USED[feature] + SHOWN[feature]
