"""Addresses that this server dials: those of its settings, and those that requests name.

Knows nothing of what is said on a link once a server has answered.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import REFUSED_RETRY_S, Outbox
from common.transfers.connection import Address, Connection

# Addresses that requests may name beyond the configured ones (a router's bootstrap_host).
NAMED_COUNT_MAX = 64
# Hellos on one link without an answer, which takes three seconds. A server that starts, or is in
# trouble, answers none either, and a new link costs it little.
UNANSWERED_HELLO_COUNT_MAX = 6


class Addresses:
    """Owner of every `Address`."""

    def __init__(self, outbox: Outbox, links: Iterable[str]) -> None:
        self._outbox = outbox
        self._addresses: dict[str, Address] = {}
        self._named_lines = LogRateLimiter()
        for link in links:
            self._add(link, is_configured=True)

    def _add(self, link: str, *, is_configured: bool) -> Address:
        address = self._addresses[link] = Address(link, is_configured)
        self._outbox.dial(link)
        return address

    def all(self) -> list[Address]:
        return list(self._addresses.values())

    def get(self, link: str) -> Address | None:
        return self._addresses.get(link)

    def ensure(self, link: str) -> Address | None:
        """The address that a request names, dialled if need be; None if there are too many."""
        address = self._addresses.get(link)
        if address is not None:
            return address
        named = [one for one in self._addresses.values() if not one.is_configured]
        if len(named) >= NAMED_COUNT_MAX:
            idle = [one for one in named if one.is_idle]
            if not idle:
                return None
            del self._addresses[idle[0].link]
            self._outbox.hang_up(idle[0].link)
        return self._add(link, is_configured=False)

    def missing(self) -> list[Address]:
        """Those whose server can't be asked now and may be soon; not those that do not fit."""
        return [
            one
            for one in self._addresses.values()
            if not (one.is_idle and one.is_refused)
            and not (one.connection is not None and one.connection.is_source)
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
        if address is None or not address.is_idle:
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
        line = text if address.is_configured else self._named_lines.admit(text, now)
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
