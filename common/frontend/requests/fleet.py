"""The decode servers that requests of this one may go on at: who they are, and how busy.

A prefill server knows its decode servers as peers. A decode server asks its prefill servers for
theirs, unless it was told. Of what others say of themselves nothing is believed but what decides
who is asked. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from common.clock import Clock
from common.config import Role, ServerConfig
from common.frontend.http.client import (
    HttpFailed,
    Request,
    ServerUrl,
    ask,
    decode_answer,
    parse_url,
)
from common.frontend.requests.scheduler_client import SchedulerClient
from common.protocol.frontend import PeerState
from common.scheduling.log_rate_limiter import LogRateLimiter

LOOK_TIMEOUT_S = 3.0
LOOK_INTERVAL_S = 1.0
SERVER_COUNT_MAX = 64
# What waits or runs at a server; its other queues are parts of these, or of peers.
LOAD_QUEUES = ("waiting", "transfer", "ready", "running")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FleetServer:
    """A decode server of this one's model that takes requests. load: requests that it has."""

    url: ServerUrl
    load: int
    request_token_max: int


class _Peer(msgspec.Struct):
    state: str = ""
    http_address: str = ""


class _Internal(msgspec.Struct):
    queues: dict[str, int] = {}


class _Info(msgspec.Struct):
    """What is read of /server_info."""

    role: str
    status: str
    fingerprint: dict[str, str]
    incarnation: str = ""
    max_request_token_count: int | None = None
    peers: list[_Peer] = []
    internal_states: list[_Internal] = []

    @property
    def load(self) -> int:
        queues = self.internal_states[0].queues if self.internal_states else {}
        return sum(max(0, queues.get(name, 0)) for name in LOAD_QUEUES)


_INFO_DECODER = msgspec.json.Decoder(_Info)


class Fleet:
    """servers: as they were at the last look. targets: URLs of the only ones that are asked; none:
    those that peers know."""

    def __init__(self, config: ServerConfig, client: SchedulerClient, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self.targets: tuple[str, ...] = config.drain_to
        self.servers: list[FleetServer] = []
        self._looked_at = -LOOK_INTERVAL_S
        self._looking = asyncio.Lock()
        self._lines = LogRateLimiter()

    @property
    def key(self) -> str:
        """What is shown to other servers: all servers of a fleet have the same keys."""
        return next(iter((*self._config.admin_api_keys, *self._config.api_keys)), "")

    @property
    def request_token_max(self) -> int:
        """Tokens of a request that any of them takes; 0 if there are none."""
        return min((server.request_token_max for server in self.servers), default=0)

    async def watch(self) -> None:
        """Look at a steady pace until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def least_loaded(self, tried: Iterable[ServerUrl]) -> FleetServer | None:
        """The one to ask next; it counts as busier by one from then on."""
        await self.look()
        known = set(tried)
        found = [server for server in self.servers if server.url not in known]
        if not found:
            return None
        chosen = min(found, key=lambda server: server.load)
        chosen.load += 1
        return chosen

    async def look(self) -> None:
        """Ask all of them, unless they were asked just now."""
        async with self._looking:
            if self._clock.now() - self._looked_at < LOOK_INTERVAL_S:
                return
            urls = _parsed(self.targets) if self.targets else await self._known_to_peers()
            infos = await asyncio.gather(*(self._info_of(url) for url in urls))
            found = [self._server_of(*one) for one in zip(urls, infos, strict=True)]
            self.servers = [server for server in found if server is not None]
            self._looked_at = self._clock.now()

    async def _known_to_peers(self) -> list[ServerUrl]:
        """Of decode servers: this server's own peers, or those of its prefill servers."""
        state = self._client.state
        peers = state.peers if state is not None else []
        own = _connected(peers)
        if self._config.role is Role.PREFILL:
            return own
        infos = await asyncio.gather(*(self._info_of(url) for url in own))
        theirs = [peer for info in infos if info is not None for peer in info.peers]
        return _connected(theirs)

    async def _info_of(self, url: ServerUrl) -> _Info | None:
        """None if it does not say."""
        request = Request("GET", "/server_info", key=self.key)
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S), ask(url, request, LOOK_TIMEOUT_S) as answer:
                document = await answer.document()
                if answer.status != 200:
                    raise HttpFailed(f"answered {answer.status} to GET /server_info")
                return decode_answer(_INFO_DECODER, document)
        except TimeoutError:
            self._warn(f"{url} does not say how it is within {LOOK_TIMEOUT_S:g} s")
        except HttpFailed as exc:
            self._warn(f"{url} does not say how it is: {exc}")
        return None

    def _server_of(self, url: ServerUrl, info: _Info | None) -> FleetServer | None:
        """None of one that is not ready, of another model, or this one itself."""
        own = self._client.server_info
        if info is None or own is None or info.incarnation == own.incarnation:
            return None
        if info.role != Role.DECODE or info.status != "ready" or not info.max_request_token_count:
            return None
        if info.fingerprint != own.fingerprint:
            self._warn(f"{url} serves another model")
            return None
        return FleetServer(url, info.load, info.max_request_token_count)

    def _warn(self, text: str) -> None:
        line = self._lines.admit(text, self._clock.now())
        if line:
            logger.warning("%s", line)


def _connected(peers: Iterable[PeerState | _Peer]) -> list[ServerUrl]:
    return _parsed(p.http_address for p in peers if p.state == "connected" and p.http_address)


def _parsed(texts: Iterable[str] | Sequence[str]) -> list[ServerUrl]:
    """Each once. Peers may call themselves anything; what is no address is left out."""
    urls: dict[ServerUrl, None] = {}
    for text in texts:
        try:
            urls[parse_url(text)] = None
        except ValueError:
            continue
    return list(urls)[:SERVER_COUNT_MAX]
