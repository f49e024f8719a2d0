"""Which prefill servers this decode server wants, and who names each. Pure.

Each source names addresses: the settings, an operator, name servers and files. An address is wanted
as long as one of them names it and no operator has removed it. One that a name server does not name
any more may live on: it is not dialled, and its connection is kept as long as it lasts. Knows
nothing of how addresses are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from common.protocol.frontend import SetPeers, WantedPeer

FLAG = "flag"
ADMIN = "admin"
# The links of a scheduler, less those that requests may ask for beside.
WANTED_COUNT_MAX = 192
# A state of the scheduler that is as old as this knows what the scheduler was told before.
STATE_AGE_MAX_S = 5.0


class WantedPeers:
    """addresses: those to dial. allowed: those that a request may name in any case.

    dropped_count: addresses that are named beyond the first WANTED_COUNT_MAX.
    """

    def __init__(self, fixed: Iterable[str], sources: Iterable[str]) -> None:
        """fixed: addresses in the settings. sources: the other entries there."""
        self._named: dict[str, dict[str, None]] = {FLAG: dict.fromkeys(fixed)}
        self._named |= {source: {} for source in sources}
        self._named[ADMIN] = {}
        self._lapsed: dict[str, tuple[str, float]] = {}  # by address: of which source, since when
        self._removed: set[str] = set()
        self._update()

    def _update(self) -> None:
        for removed in list(self._removed):
            if not self.sources_of(removed):
                self._removed.remove(removed)
        named = dict.fromkeys(one for known in self._named.values() for one in known)
        for address in named:
            self._lapsed.pop(address, None)
        wanted = [address for address in named if address not in self._removed]
        self.addresses = tuple(wanted[:WANTED_COUNT_MAX])
        self.dropped_count = len(wanted) - len(self.addresses)
        self.allowed = frozenset([*self.addresses, *self._lapsed])

    # ---- who names what --------------------------------------------------------------------------

    def set_named(
        self, source: str, addresses: Iterable[str], now: float, *, is_strict: bool
    ) -> bool:
        """All that a source names from now on; whether that has changed. is_strict: what it does
        not name any more is let go, and does not lapse."""
        before, self._named[source] = self._named[source], dict.fromkeys(addresses)
        for address in before:
            if not (is_strict or self.sources_of(address) or address in self._removed):
                self._lapsed[address] = (source, now)
        self._update()
        return before.keys() != self._named[source].keys()

    def forget_lapsed(self, known: Set[str], now: float) -> None:
        """Those that the scheduler has let go. known: addresses that it told of just now."""
        for address, (_, since) in list(self._lapsed.items()):
            if address not in known and now - since > STATE_AGE_MAX_S:
                del self._lapsed[address]
                self._update()

    # ---- what operators do -----------------------------------------------------------------------

    def add(self, address: str) -> bool:
        """Want an address whoever names it; whether there is room for it."""
        if address not in self.addresses and len(self.addresses) >= WANTED_COUNT_MAX:
            return False
        self._removed.discard(address)
        self._named[ADMIN][address] = None
        self._update()
        return True

    def remove(self, address: str) -> bool:
        """Want an address no more; whether it was wanted. One that others name stays away until it
        is added, or until none of them names it and one does again."""
        is_named = bool(self.sources_of(address)) and address not in self._removed
        is_lapsed = self._lapsed.pop(address, None) is not None
        self._named[ADMIN].pop(address, None)
        if is_named:
            self._removed.add(address)
        self._update()
        return is_named or is_lapsed

    # ---- what others are told --------------------------------------------------------------------

    def sources_of(self, address: str) -> list[str]:
        return [source for source, known in self._named.items() if address in known]

    def lapsed_of(self, address: str) -> str:
        """The source that does not name an address any more, which may live on; "" for none."""
        return self._lapsed[address][0] if address in self._lapsed else ""

    @property
    def removed(self) -> list[str]:
        """Addresses that an operator has removed and that others still name."""
        return sorted(self._removed)

    def message(self) -> SetPeers:
        lapsed = [WantedPeer(address, is_dialled=False) for address in self._lapsed]
        return SetPeers([*map(WantedPeer, self.addresses), *lapsed])
