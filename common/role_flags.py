"""The flags that one role has beside `COMMON_FLAGS`, and the reading of a role's settings.

A server that may change its role takes those of both (`--enable-role-switch`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from common.config import LocalPrefill, Role, ServerConfig
from common.errors import ConfigError
from common.flag_reading import parse_settings, to_config
from common.flag_values import Value, choice, drain_targets, number, port, switch
from common.flags import COMMON_FLAGS, Flag
from common.prefill_entries import PeerFile, read_entry
from common.request_bounds import REQUEST_TIMEOUT_S_MAX

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


PREFILL_FLAGS: tuple[Flag, ...] = (
    Flag(
        "bootstrap_port",
        ("bootstrap-port", "disaggregation-bootstrap-port"),
        port,
        "where decode servers dial",
    ),
    Flag(
        "bootstrap_timeout_s",
        ("bootstrap-timeout",),
        number(0.1, 86400),
        "seconds that half of a routed request waits, or a cache that was computed first",
    ),
    Flag(
        "serve_plain",
        ("serve-plain",),
        switch,
        "answer requests without a room as well: a connected decode server generates, and is shown "
        "an admin key",
        is_switch=True,
    ),
)

DECODE_FLAGS: tuple[Flag, ...] = (
    Flag(
        "self_test_interval_s",
        ("self-test-interval",),
        number(0, 86400),
        "seconds without a transfer after which one of a token is tried; 0: never",
    ),
    Flag(
        "local_prefill",
        ("local-prefill",),
        choice(*LocalPrefill),
        "what is computed here: off, nothing; auto, short rests of cached prompts where that is "
        "quicker; fallback, whole prompts too if no prefill server can be found",
    ),
    Flag(
        "relay_timeout_s",
        ("relay-timeout",),
        number(0, REQUEST_TIMEOUT_S_MAX),
        "seconds that a stopping server stays after --drain-timeout for requests that other decode "
        "servers have taken over; 0: none are moved",
    ),
    Flag(
        "drain_to",
        ("drain-to",),
        drain_targets,
        "URLs of decode servers that take them over, comma separated, or `auto` for those that its "
        "prefill servers know; an admin key is shown to them",
    ),
    Flag(
        "prefill",
        ("prefill",),
        prefill_entries,
        "prefill servers' bootstrap ports: host:port, dns:NAME:PORT for all addresses of a name, "
        "file:PATH of a file that is watched, comma separated; or `none` to compute prompts here",
    ),
    Flag(
        "bootstrap_allow",
        ("bootstrap-allow",),
        bootstrap_allow,
        "hosts, patterns and networks that bootstrap_host may name besides the addresses of "
        "--prefill: any, or none",
    ),
)

OWN_FLAGS = {Role.PREFILL: PREFILL_FLAGS, Role.DECODE: DECODE_FLAGS}
ALL_FLAGS = (*COMMON_FLAGS, *PREFILL_FLAGS, *DECODE_FLAGS)


def parse_role(
    role: Role, description: str, argv: Sequence[str], **defaults: Value
) -> ServerConfig:
    """The settings of a server that begins in a role.

    Raises: ConfigError, one line that names the flag, the value and what is allowed.
    """
    program = f"baton-{role}"
    defaults |= {"host": "127.0.0.1"}
    flags = ALL_FLAGS if _may_switch(program, argv) else (*COMMON_FLAGS, *OWN_FLAGS[role])
    settings = parse_settings(program, description, flags, argv, **defaults)
    if role is Role.DECODE and "prefill" not in settings:
        raise ConfigError(
            "--prefill is required: host:port, dns:NAME:PORT or file:PATH of prefill servers, "
            f"comma separated, or `{ALONE}`"
        )
    return to_config(settings | {"role": role})


def _may_switch(program: str, argv: Sequence[str]) -> bool:
    """Whether the flags of both roles are taken. One that is in neither is refused later on."""
    if {"-h", "--help"}.intersection(argv):
        return False
    try:
        settings = parse_settings(program, "", ALL_FLAGS, argv)
    except ConfigError:
        return False
    return bool(settings.get("enable_role_switch"))
