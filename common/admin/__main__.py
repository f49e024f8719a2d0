"""`baton-admin`: looks at a fleet and tells its servers what to do, by their HTTP APIs.

    baton-admin fleet URL [URL ...] [--json] [--watch SECONDS]
    baton-admin drain URL [--to URL,...]
    baton-admin switch URL prefill|decode [--wait SECONDS]
    baton-admin peers URL [--add HOST:PORT | --remove HOST:PORT] [--json]

Exit codes: 0; EXIT_FAILED if something that was asked for could not be done; EXIT_CONFIG if an
argument can't be used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.admin import commands
from common.admin.answers import NotUnderstood
from common.admin.calls import Caller, Refused, Unreachable
from common.admin.commands import EXIT_DONE, complain
from common.clock import SystemClock
from common.config import Role
from common.config_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, gather_keys
from common.errors import ConfigError
from common.exit_codes import EXIT_CONFIG, EXIT_FAILED
from common.flag_reading import OneLineParser
from common.flag_values import address, api_keys, number
from common.frontend.http.client import ServerUrl, parse_url

# A server whose scheduler is silent says so after two seconds.
TIMEOUT_S = 5.0
# For requests to end, and for the first transfer in the new role.
SWITCH_WAIT_S = 120.0
T = TypeVar("T")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises: ConfigError. Exits with 0 after --help."""
    parser = OneLineParser(
        prog="baton-admin", allow_abbrev=False,
        description="Looks at a fleet and tells its servers what to do.",
    )  # fmt: skip
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _common_flags()
    json_help = "one JSON document instead of tables"

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return parsers.add_parser(
            name, help=text, description=text, parents=[common], allow_abbrev=False
        )

    fleet = command("fleet", "Show every server of a fleet and the links between them.")
    fleet.add_argument("urls", nargs="+", type=_taking(parse_url), metavar="URL")
    fleet.add_argument("--json", action="store_true", help=json_help)
    fleet.add_argument(
        "--watch",
        type=_taking(number(0.1, 86400)),
        metavar="SECONDS",
        help="show it again and again",
    )
    drain = command("drain", "Let a server end what it has, and stop.")
    drain.add_argument("url", type=_taking(parse_url), metavar="URL")
    drain.add_argument(
        "--to", type=_taking(_urls), default=(), metavar="URL,...",
        help="decode servers that its open requests may move to",
    )  # fmt: skip
    switch = command("switch", "Let a server end what it has, and go on in a role.")
    switch.add_argument("url", type=_taking(parse_url), metavar="URL")
    switch.add_argument("role", choices=[str(role) for role in Role])
    switch.add_argument(
        "--wait", type=_taking(number(0, 86400)), default=SWITCH_WAIT_S, metavar="SECONDS",
        help=f"for it to answer in its role; 0: not at all (default: {SWITCH_WAIT_S:g})",
    )  # fmt: skip
    peers = command("peers", "Show the peers of a server, add a prefill server or let one go.")
    peers.add_argument("url", type=_taking(parse_url), metavar="URL")
    either = peers.add_mutually_exclusive_group()
    either.add_argument("--add", type=_taking(address), metavar="HOST:PORT")
    either.add_argument("--remove", type=_taking(address), metavar="HOST:PORT")
    either.add_argument("--json", action="store_true", help=json_help)
    given, unknown = parser.parse_known_args(argv)
    if unknown:  # it might be a key under a wrong flag
        raise ConfigError(f"unknown argument {unknown[0].partition('=')[0]!r}; --help lists all")
    return given


def _common_flags() -> OneLineParser:
    flags = OneLineParser(add_help=False)
    for kind, variable in (("api", API_KEY_VARIABLE), ("admin-api", ADMIN_API_KEY_VARIABLE)):
        flags.add_argument(
            f"--{kind}-key", type=_taking(api_keys, is_secret=True), default=(), metavar="KEY",
            help=f"shown to servers; others of this machine may see it, unlike {variable}",
        )  # fmt: skip
        flags.add_argument(
            f"--{kind}-key-file", default="", metavar="FILE", help="whose first line is the key"
        )
    flags.add_argument(
        "--timeout", type=_taking(number(0.1, 600)), default=TIMEOUT_S, metavar="SECONDS",
        help=f"for each answer (default: {TIMEOUT_S:g})",
    )  # fmt: skip
    return flags


def _taking(parse: Callable[[str], T], *, is_secret: bool = False) -> Callable[[str], T]:
    """`parse` with errors that argparse shows."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as exc:
            shown = "(not shown)" if is_secret else repr(text)
            raise argparse.ArgumentTypeError(f"{shown}: {exc}") from exc

    return read


def _urls(text: str) -> tuple[ServerUrl, ...]:
    return tuple(dict.fromkeys(parse_url(part.strip()) for part in text.split(",")))


def caller_of(given: argparse.Namespace) -> Caller:
    """Raises: ConfigError naming the file or the variable of a key."""
    keys = gather_keys(given.api_key, "--api-key-file", given.api_key_file, API_KEY_VARIABLE)
    admin_keys = gather_keys(
        given.admin_api_key,
        "--admin-api-key-file",
        given.admin_api_key_file,
        ADMIN_API_KEY_VARIABLE,
    )
    named = tuple(dict.fromkeys(given.urls)) if given.command == "fleet" else (given.url,)
    return Caller(named, next(iter(keys), ""), next(iter(admin_keys), ""), given.timeout)


async def run(given: argparse.Namespace, caller: Caller) -> int:
    try:
        match given.command:
            case "fleet":
                return await commands.show_fleet(caller, is_json=given.json, watch_s=given.watch)
            case "drain":
                return await commands.drain(caller, given.to)
            case "switch":
                return await commands.switch(caller, Role(given.role), given.wait, SystemClock())
            case "peers" if given.add:
                return await commands.add_peer(caller, given.add)
            case "peers" if given.remove:
                return await commands.remove_peer(caller, given.remove)
            case "peers":
                return await commands.show_peers(caller, is_json=given.json)
            case _:
                raise AssertionError(given.command)
    except (Unreachable, Refused, NotUnderstood) as exc:
        complain(f"{given.url}: {exc}")
        return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = parse_arguments(argv)
        caller = caller_of(given)
    except ConfigError as error:
        complain(str(error))
        return EXIT_CONFIG
    try:
        return asyncio.run(run(given, caller))
    except KeyboardInterrupt:
        is_watch = given.command == "fleet" and given.watch is not None
        return EXIT_DONE if is_watch else EXIT_FAILED  # no other way to end a watch
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
