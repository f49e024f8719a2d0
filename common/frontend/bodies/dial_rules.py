"""Which prefill servers a request may name: bootstrap_host makes this server dial. Pure.

Names are compared as they are written and never looked up, so that an answer of a name server can't
change what is allowed; a network in the rules allows addresses only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from common.channel.address import Address, make_address
from common.errors import ConfigError, RequestError

ANY = "any"
RULES_CACHE_COUNT = 8  # a process has one set of rules at a time; tests have a few

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class DialRules:
    """allow: what --bootstrap-allow says. wanted: "host:port" of this server's prefill servers,
    which are always allowed."""

    def __init__(self, allow: tuple[str, ...], wanted: Iterable[str]) -> None:
        self._allows_any = ANY in allow
        self._wanted = frozenset(wanted)
        self._networks: list[Network] = []
        self._patterns: list[str] = []
        for rule in allow:
            try:
                self._networks.append(ipaddress.ip_network(rule, strict=False))
            except ValueError:
                self._patterns.append(rule.lower())

    def check(self, host: str, port: int) -> Address:
        """The address to dial. Raises: RequestError: 400 if it is none, 403 if not allowed."""
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            address = make_address(bare, port)
        except ConfigError as error:
            raise RequestError(f"bootstrap_host: {error}", field="bootstrap_host") from error
        if not self._allows(address):
            raise RequestError(
                f"bootstrap_host={host}: this server may not dial {address} (--bootstrap-allow)",
                field="bootstrap_host",
                status=403,
            )
        return address

    def _allows(self, address: Address) -> bool:
        if self._allows_any or str(address) in self._wanted:
            return True
        try:
            number = ipaddress.ip_address(address.host)
        except ValueError:
            name = address.host.lower().rstrip(".")
            return any(fnmatchcase(name, pattern) for pattern in self._patterns)
        if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
            number = number.ipv4_mapped
        return any(number in network for network in self._networks)


@lru_cache(RULES_CACHE_COUNT)
def dial_rules(allow: tuple[str, ...], wanted: frozenset[str]) -> DialRules:
    """The rules of a server's settings, and of what it wants now."""
    return DialRules(allow, wanted)
