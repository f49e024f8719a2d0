"""Addresses that this server dials: those that are wanted, and those that requests name.

    wanted ─┬─► kept as long as its connection lasts ─┬─► leaving ─► hung up
            └─────────────────────────────────────────┘

Knows nothing of who wants an address, nor of what is said on a link once a server has answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from common.protocol.frontend import WantedPeer
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import REFUSED_RETRY_S, Outbox
from common.transfers.connection import Address, Connection, Standing

# Addresses that requests may name beyond the wanted ones (a router's bootstrap_host).
NAMED_COUNT_MAX = 64
# Hellos on one link without an answer, which takes three seconds. A server that starts, or is in
# trouble, answers none either, and a new link costs it little.
UNANSWERED_HELLO_COUNT_MAX = 6
# How long a link stays that nothing needs any more. Meanwhile its last message leaves, and the peer
# hears, of what it asked for last, that nothing comes: it repeats that question every second.
LINGER_S = 5.0


class Addresses:
    """Owner of every `Address`."""

    def __init__(self, outbox: Outbox, links: Iterable[str]) -> None:
        self._outbox = outbox
        self._addresses: dict[str, Address] = {}
        self._named_lines = LogRateLimiter()
        self.want(map(WantedPeer, links))

    def _add(self, link: str, standing: Standing) -> None:
        self._addresses[link] = Address(link, standing)
        self._outbox.dial(link)

    def all(self) -> list[Address]:
        return list(self._addresses.values())

    def get(self, link: str) -> Address | None:
        return self._addresses.get(link)

    def want(self, peers: Iterable[WantedPeer]) -> None:
        """All that are wanted from now on. Others leave, but for those that requests name."""
        wanted = {peer.address: peer for peer in peers}
        for link, peer in wanted.items():
            address = self._addresses.get(link)
            if address is None and peer.is_dialled:
                self._add(link, Standing.WANTED)
            elif address is not None and peer.is_dialled:
                _take_back(address, Standing.WANTED)
            elif address is not None and address.standing is not Standing.NAMED:
                _take_back(address, Standing.KEPT)
        for address in self.all():
            if address.link not in wanted and address.standing is not Standing.NAMED:
                address.standing = Standing.LEAVING

    def ensure(self, link: str) -> None:
        """Dial the address that a request names, unless there are too many."""
        address = self._addresses.get(link)
        if address is not None and address.is_dialled:
            return
        named = [one for one in self._addresses.values() if one.standing is Standing.NAMED]
        if len(named) >= NAMED_COUNT_MAX:
            idle = [one for one in named if one.is_idle]
            if not idle:
                return
            self._forget(idle[0])
        if address is None:
            self._add(link, Standing.NAMED)
        else:
            _take_back(address, Standing.NAMED)

    # ---- those that leave ------------------------------------------------------------------------

    def leaving(self) -> list[Address]:
        """Those that nothing new may be asked of; a lost one that was kept is one of them."""
        found: list[Address] = []
        for address in self._addresses.values():
            if address.standing is Standing.KEPT and address.is_idle:
                address.standing = Standing.LEAVING
            if address.standing is Standing.LEAVING:
                found.append(address)
        # A process that is wanted by another name stays connected by the one that it has.
        twins = {one.twin for one in self._addresses.values() if found and one.is_dialled}
        for address in found:
            if address.connection is not None:
                address.connection.is_leaving = address.incarnation not in twins
        return found

    def hang_up_if_due(self, address: Address, now: float, *, is_used: bool) -> None:
        """One that leaves, once nothing is connected and nothing needs its link any more."""
        if is_used or not address.is_idle:
            address.leaves_at = math.inf
        elif address.leaves_at == math.inf:
            address.leaves_at = now + LINGER_S
        elif now >= address.leaves_at:
            self._forget(address)

    def _forget(self, address: Address) -> None:
        del self._addresses[address.link]
        self._outbox.hang_up(address.link)

    def missing(self) -> list[Address]:
        """Those whose server can't be asked now and may be soon; not those that do not fit."""
        return [
            one
            for one in self._addresses.values()
            if one.is_dialled and not (one.is_idle and one.is_refused) and not one.is_source
        ]

    # ---- why nothing is connected ----------------------------------------------------------------

    def refuse(self, address: Address, role: str, detail: str, now: float) -> None:
        """This server and the one at the address do not fit: it is asked again later.

        role: of the other one, "other" if it did not say.
        """
        if not address.is_refused or address.detail != detail:
            text = f"{role} server {address.link} and this server refused each other: {detail}"
            self._warn(address, text, now)
        self.leave_alone(address, detail, now)

    def note_twin(self, address: Address, other: Connection, now: float) -> None:
        """One process answers at two addresses: it is connected by one, and found by both."""
        if address.twin != other.incarnation:
            self._outbox.report(
                f"{other.remote.role} server {address.link} is {other.link} by another name"
            )
        address.twin = other.incarnation
        self.leave_alone(address, f"is {other.link} by another name", now)

    def leave_alone(self, address: Address, detail: str, now: float) -> None:
        address.is_refused = True
        address.detail = detail
        address.unanswered_hello_count = 0
        address.next_hello_at = now + REFUSED_RETRY_S

    def note_link_refused(self, link: str, reason: str, now: float) -> None:
        """The connection can't be made. One that was there is missed by its silence."""
        address = self._addresses.get(link)
        if address is None or not address.is_idle or not address.is_dialled:
            return
        if reason not in address.link_failures:
            address.link_failures.add(reason)
            self._warn(address, f"can't connect to prefill server {link}: {reason}", now)
        address.is_refused = True
        address.detail = reason
        if not address.must_redial:
            # ZMQ gives up a connection for good whose keys were refused.
            address.must_redial = True
            address.next_hello_at = now + REFUSED_RETRY_S

    def _warn(self, address: Address, text: str, now: float) -> None:
        """Clients may name as many addresses as they like."""
        is_wanted = address.standing is Standing.WANTED
        line = text if is_wanted else self._named_lines.admit(text, now)
        if line:
            self._outbox.report(line, is_warning=True)

    def redial_if_due(self, address: Address) -> None:
        """Before a Hello: on a link whose other end does not listen nothing is ever answered, and
        one that is dialled anew is another link."""
        if address.must_redial or address.unanswered_hello_count >= UNANSWERED_HELLO_COUNT_MAX:
            address.must_redial = False
            address.unanswered_hello_count = 0
            self._outbox.hang_up(address.link)
            self._outbox.dial(address.link)
        address.unanswered_hello_count += 1


def _take_back(address: Address, standing: Standing) -> None:
    address.standing = standing
    address.leaves_at = math.inf
    if address.connection is not None:
        address.connection.is_leaving = False
