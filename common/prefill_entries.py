"""What stands in --prefill: addresses of prefill servers, names of name servers, and files.

Looks nothing up. An entry stays the text that it is in the settings; here is what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.flags.values import address

MUST = "must be host:port with a port in 1..65535, dns:NAME:PORT or file:PATH"
_DNS, _FILE = "dns:", "file:"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")


@dataclass(frozen=True, slots=True)
class DnsName:
    """Every address of a name is a prefill server, all with one port."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class PeerFile:
    """A text file of addresses, one in a line."""

    path: str


def read_entry(text: str) -> str | DnsName | PeerFile:
    """The meaning of an entry; a string is an address. Raises: ValueError.

    A server on a host that is called `dns` or `file` is an address as any other.
    """
    try:
        host, _, port = address(text).rpartition(":")
        return f"{host}:{int(port)}"
    except ValueError:
        if text.startswith(_FILE) and text.isprintable() and text != _FILE:
            return PeerFile(text.removeprefix(_FILE))
        name, _, port = text.removeprefix(_DNS).rpartition(":")
        is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 1 <= int(port) <= 65535
        if not (text.startswith(_DNS) and _NAME.fullmatch(name) and is_port):
            raise ValueError(MUST) from None
        return DnsName(name, int(port))


def fixed_addresses(entries: Iterable[str]) -> list[str]:
    """Those that the settings themselves name. Raises: ValueError if an entry is none."""
    return [found for found in map(read_entry, entries) if isinstance(found, str)]
