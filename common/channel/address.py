"""Addresses of servers, "host:port" or "[v6 address]:port". Opens nothing."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from common.errors import ConfigError

HOST_LENGTH_MAX = 253  # the longest DNS name
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_ONLY_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True)
class Address:
    """host: a DNS name, an IPv4 or an IPv6 address without brackets. port: 0..65535."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def bracketed_host(self) -> str:
        """The host as it stands before a port."""
        return f"[{self.host}]" if self.is_ipv6 else self.host

    def __str__(self) -> str:
        return f"{self.bracketed_host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address to dial. Raises: ConfigError naming the invalid part."""
    if text.startswith("["):
        host, bracket, port = text[1:].rpartition("]:")
        if not bracket:
            raise ConfigError(f"address {text!r}: must be [IPv6 address]:port")
        if ":" not in host:
            raise ConfigError(f"address {text!r}: only an IPv6 address stands in brackets")
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ConfigError(f"address {text!r}: must be host:port")
        if ":" in host:
            raise ConfigError(f"address {text!r}: an IPv6 address must stand in brackets")
    if not (port.isascii() and port.isdigit() and 1 <= len(port) <= 5):
        raise ConfigError(f"address {text!r}: port {port!r} must be in 1..65535")
    if int(port) == 0:
        raise ConfigError(f"address {text!r}: port 0 can't be dialled, it must be in 1..65535")
    return make_address(host, int(port))


def make_address(host: str, port: int) -> Address:
    """An address of a host and a port; port 0 lets the system choose where one listens.

    Raises: ConfigError naming the invalid part.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port}: must be in 0..65535")
    if not 1 <= len(host) <= HOST_LENGTH_MAX:
        raise ConfigError(f"host {host[:32]!r}: must have 1..{HOST_LENGTH_MAX} characters")
    if ":" in host or _ONLY_DIGITS_AND_DOTS.fullmatch(host):
        try:
            ipaddress.ip_address(host)
        except ValueError as exc:
            raise ConfigError(f"host {host!r}: is neither an IP address nor a name") from exc
    elif not _NAME.fullmatch(host):
        raise ConfigError(f"host {host!r}: must be an IP address or a DNS name")
    return Address(host, port)
