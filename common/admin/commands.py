"""The commands of `baton-admin` on servers that are there: what they ask, and what they show.

Each returns the exit code: EXIT_FAILED if something that was asked for could not be done. Knows
nothing of the command line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from common.admin.answers import NotUnderstood, Peers, decode
from common.admin.calls import Caller, Refused, Unreachable, harmless, to_json
from common.admin.view import fleet_document, fleet_text, peers_document, peers_text
from common.admin.walk import Fleet, find_fleet
from common.clock import Clock
from common.config import Role
from common.exit_codes import EXIT_FAILED
from common.frontend.http.client import ServerUrl

EXIT_DONE = 0
POLL_INTERVAL_S = 0.25
CLEAR_SCREEN = "\x1b[H\x1b[2J"


class _Drained(msgspec.Struct):
    open_requests: int


class _Switched(msgspec.Struct):
    is_done: bool
    open_requests: int


class _Sources(msgspec.Struct):
    sources: list[str]


# ---- fleet ---------------------------------------------------------------------------------------


async def show_fleet(caller: Caller, *, is_json: bool, watch_s: float | None) -> int:
    """watch_s: show it again after so many seconds, until cancelled; None: once. A server that has
    answered is asked again even if no peer names it any more."""
    starts = dict.fromkeys(caller.named)
    while True:
        fleet = await find_fleet(caller, starts)
        if is_json:
            say(to_json(fleet_document(fleet), is_pretty=watch_s is None))
        else:
            is_screen = watch_s is not None and sys.stdout.isatty()
            say((CLEAR_SCREEN if is_screen else "") + fleet_text(fleet))
        if watch_s is None:
            return _code_of(fleet, caller.named)
        starts |= dict.fromkeys(server.url for server in fleet.servers if server.said)
        await asyncio.sleep(watch_s)


def _code_of(fleet: Fleet, named: Sequence[ServerUrl]) -> int:
    """Of servers that were only found, a line says whether they answer."""
    answered = [server for server in fleet.servers if server.said]
    urls = {url for server in answered for url in (server.url, *server.also_urls)}
    return EXIT_DONE if urls.issuperset(named) and fleet.is_complete else EXIT_FAILED


# ---- one server ----------------------------------------------------------------------------------


async def drain(caller: Caller, to: Sequence[ServerUrl]) -> int:
    (url,) = caller.named
    body = {"to": [str(one) for one in to]} if to else None
    answer = decode(await caller.change("POST", url, "/drain", body), _Drained)
    say(f"{url} drains: {_requests(answer.open_requests)}")
    return EXIT_DONE


async def switch(caller: Caller, role: Role, wait_s: float, clock: Clock) -> int:
    """wait_s: for the server to answer in its role; 0: not at all."""
    (url,) = caller.named
    end_at = clock.now() + wait_s
    body = {"role": str(role)}
    answer = decode(await caller.change("POST", url, "/switch_role", body), _Switched)
    if answer.is_done:
        say(f"{url} is a {role} server already")
        return EXIT_DONE
    say(f"{url} ends what it has, then goes on as a {role} server: "
        f"{_requests(answer.open_requests)}")  # fmt: skip
    if not wait_s:
        return EXIT_DONE
    while True:
        try:
            info = await caller.info(url)
            if info.role == role and not info.standby and info.state != "draining":
                detail = f", {info.state}: {info.detail}" if info.detail else f", {info.state}"
                say(harmless(f"{url} is a {role} server now{detail}"))
                return EXIT_DONE
            seen = f"it is a {info.kind} server, {info.state}"
        except (Unreachable, Refused, NotUnderstood) as exc:
            seen = str(exc)
        if clock.now() >= end_at:
            complain(f"{url} is not a {role} server after {wait_s:g} s: {seen}")
            return EXIT_FAILED
        await asyncio.sleep(POLL_INTERVAL_S)


async def show_peers(caller: Caller, *, is_json: bool) -> int:
    (url,) = caller.named
    peers = decode(await caller.get(url, "/peers"), Peers)
    say(to_json(peers_document(peers), is_pretty=True) if is_json else peers_text(peers))
    return EXIT_DONE


async def add_peer(caller: Caller, address: str) -> int:
    (url,) = caller.named
    answer = decode(await caller.change("POST", url, "/peers", {"address": address}), _Sources)
    say(harmless(f"{url} connects to {address}, named by {', '.join(answer.sources)}"))
    return EXIT_DONE


async def remove_peer(caller: Caller, address: str) -> int:
    (url,) = caller.named
    path = f"/peers?address={quote(address, safe='')}"
    decode(await caller.change("DELETE", url, path), _Sources)
    say(f"{url} lets {address} go as soon as nothing is under way")
    return EXIT_DONE


def _requests(count: int) -> str:
    return f"{count} open request{'' if count == 1 else 's'}"


def say(text: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    sys.stderr.write(f"baton-admin: {harmless(text)}\n")
