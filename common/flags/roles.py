"""Reads the settings of a server that begins in a role.

A server that may change its role takes the flags of both (`--enable-role-switch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import DEFAULT_BOOTSTRAP_PORT, Role, ServerConfig
from common.errors import ConfigError
from common.flags.addresses import ALONE
from common.flags.foreign import foreign_flags_of
from common.flags.reading import parse_settings, to_config
from common.flags.table import ALL_FLAGS, flags_of
from common.flags.values import Value


def parse_role(
    role: Role, description: str, argv: Sequence[str], **defaults: Value
) -> ServerConfig:
    """The settings of a server that begins in a role.

    Raises: ConfigError, one line that names the flag, the value and what is allowed.
    """
    program = f"baton-{role}"
    defaults |= {"host": "127.0.0.1"}
    flags = ALL_FLAGS if _may_switch(program, role, argv) else flags_of(role)
    foreign = foreign_flags_of(role)
    settings = parse_settings(program, description, flags, foreign, argv, **defaults)
    if role is Role.DECODE and "prefill" not in settings:
        raise ConfigError(
            "--prefill is required: host:port, dns:NAME:PORT or file:PATH of prefill servers' "
            f"bootstrap ports ({DEFAULT_BOOTSTRAP_PORT} unless they say otherwise), comma "
            f"separated, or `{ALONE}`"
        )
    return to_config(settings | {"role": role})


def _may_switch(program: str, role: Role, argv: Sequence[str]) -> bool:
    """Whether the flags of both roles are taken. One that is in neither is refused later on."""
    if {"-h", "--help"}.intersection(argv):
        return False
    try:
        settings = parse_settings(program, "", ALL_FLAGS, foreign_flags_of(role), argv)
    except ConfigError:
        return False
    return bool(settings.get("enable_role_switch"))
