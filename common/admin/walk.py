"""Finds every server of a fleet from some of them: each is asked for its peers, until no new one is
named. All that are known are asked at the same time.

Knows nothing of how the servers are shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from common.admin.answers import NotUnderstood, Peer, ServerAnswer
from common.admin.calls import Caller, Refused, Unreachable
from common.frontend.http.client import ServerUrl, parse_url

# Bounds for a server that makes peers up. Files of this process are bounded too: 1024, usually.
SERVER_COUNT_MAX = 512
# Prefill servers name decode servers, and those prefill servers: few rounds find all of them.
ROUND_COUNT_MAX = 16


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a fleet. said: None if it did not say it. state, detail: why not, then.
    called: by a peer that named it, "" if none did."""

    url: ServerUrl
    said: ServerAnswer | None
    state: str
    detail: str
    called: str = ""
    also_urls: tuple[ServerUrl, ...] = ()

    @property
    def name(self) -> str:
        return (self.said.name if self.said else self.called) or self.url.address


@dataclass(frozen=True, slots=True)
class Fleet:
    """is_complete: False if more servers were named than are asked."""

    servers: tuple[Server, ...]
    is_complete: bool

    def name_of(self, peer: Peer) -> str:
        """As the table of servers has it, else as the other end of the link has it."""
        for server in self.servers:
            if server.said and server.said.incarnation == peer.incarnation != "":
                return server.name
        return peer.label

    def links(self) -> Iterator[tuple[Server, Peer]]:
        """Every link as each of its two ends sees it."""
        for server in self.servers:
            for peer in server.said.peers if server.said else ():
                yield server, peer


async def find_fleet(caller: Caller, starts: Iterable[ServerUrl]) -> Fleet:
    """Servers in the order in which they were found."""
    known: dict[ServerUrl, Peer] = {}  # as the first server has it that names it
    servers: list[Server] = []
    named = dict.fromkeys(starts, Peer())
    for _ in range(ROUND_COUNT_MAX):
        urls = list(named)[: SERVER_COUNT_MAX - len(known)]
        known |= {url: named[url] for url in urls}
        servers += await asyncio.gather(*(_look(caller, url, named[url].name) for url in urls))
        is_complete = len(urls) == len(named)
        named = _not_known(servers, known)
        if not named or not is_complete:
            break
    return Fleet(_each_once(servers, known), is_complete and not named)


async def _look(caller: Caller, url: ServerUrl, called: str) -> Server:
    try:
        said = await caller.info(url)
    except Unreachable as exc:
        return Server(url, None, "unreachable", str(exc), called)
    except (Refused, NotUnderstood) as exc:
        return Server(url, None, "unknown", str(exc), called)
    return Server(url, said, said.state, said.detail, called)


def _not_known(servers: Sequence[Server], known: dict[ServerUrl, Peer]) -> dict[ServerUrl, Peer]:
    """Addresses that peers are said to have, and that were not asked yet.

    One whose incarnation has answered already is the same server under another address, which may
    be of no use here: containers have names of their own.
    """
    answered = {server.said.incarnation for server in servers if server.said} - {""}
    found: dict[ServerUrl, Peer] = {}
    for peer in (peer for server in servers if server.said for peer in server.said.peers):
        url = url_of(peer)
        if url is not None and url not in known and peer.incarnation not in answered:
            found.setdefault(url, peer)
    return found


def url_of(peer: Peer) -> ServerUrl | None:
    """None if it says none: peers may call themselves anything."""
    try:
        return parse_url(peer.http_address) if peer.http_address else None
    except ValueError:
        return None


def _each_once(servers: Sequence[Server], known: dict[ServerUrl, Peer]) -> tuple[Server, ...]:
    """A server that answers at several addresses is shown at the first one."""
    first: dict[str, int] = {}
    kept: list[Server] = []
    for server in sorted(servers, key=lambda server: server.said is None):
        incarnation = server.said.incarnation if server.said else known[server.url].incarnation
        if incarnation in first:
            index = first[incarnation]
            kept[index] = replace(kept[index], also_urls=(*kept[index].also_urls, server.url))
            continue
        if server.said and incarnation:
            first[incarnation] = len(kept)
        kept.append(server)
    order = {server.url: index for index, server in enumerate(servers)}
    return tuple(sorted(kept, key=lambda server: order[server.url]))
