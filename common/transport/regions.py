"""The registered memory of one transport, by name. Knows nothing of how an engine reaches it."""

from __future__ import annotations

from collections.abc import Sequence

from common.transport.transport import Region, RegionRefused


class Regions:
    """Owner of the names, in the order of registration."""

    def __init__(self) -> None:
        self._by_name: dict[str, Region] = {}

    def __getitem__(self, name: str) -> Region:
        return self._by_name[name]

    def check_new(self, name: str, nbytes: int) -> None:
        """Raises: RegionRefused."""
        if name in self._by_name:
            raise RegionRefused(f"region {name}: the name is taken")
        if nbytes <= 0:
            raise RegionRefused(f"region {name}: nbytes={nbytes} must be positive")

    def add(self, region: Region) -> Region:
        self._by_name[region.name] = region
        return region

    def named(self, names: Sequence[str] | None) -> list[Region]:
        """These regions in this order; None: all of them. Raises: RegionRefused."""
        if names is None:
            return list(self._by_name.values())
        for name in names:
            if name not in self._by_name:
                raise RegionRefused(f"region {name}: must be one of {sorted(self._by_name)}")
        return [self._by_name[name] for name in names]

    def describe(self) -> dict[str, int]:
        return {name: region.nbytes for name, region in self._by_name.items()}
