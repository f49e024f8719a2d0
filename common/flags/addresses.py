"""From the text of a flag to where a decode server's prefill servers are.

Each function returns the value or raises `ValueError("must be ...")`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from common.prefill_entries import PeerFile, read_entry

_RULE = re.compile(r"[A-Za-z0-9._:*/-]+")
ALONE = "none"  # what --prefill says when this server is to compute prompts itself


def prefill_entries(value: str) -> tuple[str, ...]:
    """The list of --prefill; empty for `none`. Raises: ValueError."""
    if value == ALONE:
        return ()
    entries = tuple(map(_prefill_entry, value.split(",")))
    if len(set(entries)) != len(entries):
        raise ValueError("must name every prefill server once")
    return entries


def _prefill_entry(text: str) -> str:
    """As it is kept: the path of a file is an absolute one."""
    try:
        found = read_entry(text.strip())
    except ValueError as error:
        raise ValueError(f"{error}, comma separated, or `{ALONE}`") from None
    if isinstance(found, PeerFile):
        return f"file:{Path(found.path).absolute()}"
    return found if isinstance(found, str) else text.strip()


def bootstrap_allow(value: str) -> tuple[str, ...]:
    """Hosts, patterns and networks; empty for `none`. Raises: ValueError."""
    if value == ALONE:
        return ()
    rules = tuple(part.strip() for part in value.split(","))
    if not all(_RULE.fullmatch(rule) for rule in rules):
        raise ValueError("must be hosts, patterns like *.svc, networks like 10.0.0.0/8, or any")
    for rule in rules:
        if "/" in rule:
            ipaddress.ip_network(rule, strict=False)  # its ValueError says what is wrong
    return rules
