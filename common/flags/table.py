"""All settings of a server, in the groups of `--help`, and which of them a role has."""

from __future__ import annotations

from common.config import Role
from common.flags.flag import Flag, Group
from common.flags.model import DEVICE, MODEL
from common.flags.operation import LOGS, SECURITY, TIME, TRANSFERS
from common.flags.serving import ADDRESSES, CACHE, ROLES
from common.flags.speculation import SPECULATION

GROUPS: tuple[Group, ...] = (
    Group("model", MODEL),
    Group("addresses", ADDRESSES),
    Group("roles", ROLES),
    Group("device and ranks", DEVICE),
    Group("cache and batches", CACHE),
    Group("speculation", SPECULATION),
    Group("transfers", TRANSFERS),
    Group("time", TIME),
    Group("security", SECURITY),
    Group("logs, metrics and traces", LOGS),
)
ALL_FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS for flag in group.flags)


def flags_of(role: Role) -> tuple[Flag, ...]:
    return tuple(flag for flag in ALL_FLAGS if flag.role in (None, role))
