"""Which prefill server a request is sent to: the one its router named, or one of those that can.

Of those, two are drawn, and of the two and those that have some of the prompt cached, the one is
asked that will be done first. Decode servers that heard the same at the same time would otherwise
all ask the same server. None is asked for more at a time than it says it takes: a request beyond
that waits here, where it can still go to another one.

Knows nothing of pages. Writes nothing.
"""

from __future__ import annotations

import random
from math import log

from common.transfers.connection import Connection
from common.transfers.transfers import Transfers
from decode_server.expected_time import ExpectedTime
from decode_server.request import DecodeRequest

# Expected times are alike if they differ by less than this factor, or are shorter than this.
KNOWN_RATIO = 1.5
SHORTEST_S = 1e-3


class Choice:
    def __init__(self, transfers: Transfers, times: ExpectedTime, rng: random.Random) -> None:
        self._links = transfers.links
        self._incoming = transfers.incoming
        self._times = times
        self._rng = rng

    def may_ask_any(self, now: float) -> bool:
        """Whether a request that may go anywhere could be sent somewhere, its length aside."""
        return any(self._may_ask(one, now) for one in self._links.connections.each_source())

    def _may_ask(self, source: Connection, now: float) -> bool:
        return self._is_healthy(source, now) and self._has_room(source)

    @staticmethod
    def _is_healthy(source: Connection, now: float) -> bool:
        return source.breaker.allows(now) and not source.is_suspect

    def _healthy(self, request: DecodeRequest, now: float) -> list[Connection]:
        """Those that may go on, and take so many tokens."""
        return [
            source
            for source in self._links.connections.sources()
            if len(request.token_ids) <= source.request_token_max and self._is_healthy(source, now)
        ]

    def _has_room(self, source: Connection) -> bool:
        return source.has_room(self._incoming.open_count(source.attachment))

    def choose(self, request: DecodeRequest, now: float) -> Connection | None:
        """The prefill server of a request: the one its router named, else one of the others that
        have not failed it, if there is any."""
        if request.tested_link:
            tested = self._links.connections.on_link(request.tested_link)
            is_up = tested is not None and tested.is_up
            return tested if tested is not None and is_up and self._has_room(tested) else None
        if request.bootstrap is not None:
            named = self._links.find(request.bootstrap)
            is_up = named is not None and not named.is_suspect
            if request.output_count == 0:  # its room is known there and nowhere else
                return named if is_up else None
            if named is not None and is_up and not named.is_leaving and self._has_room(named):
                return named
        candidates = [one for one in self._healthy(request, now) if self._has_room(one)]
        if not candidates:
            return None
        fresh = [source for source in candidates if source.link not in request.tried_links]
        return self._draw(request, fresh or candidates)

    def home_of(self, request: DecodeRequest, now: float) -> tuple[Connection | None, int]:
        """Of the prefill servers that take caches, the one that has most of a request's tokens, and
        how many. If none has any, one as for a new request: others find it there by its marks."""
        targets = [one for one in self._healthy(request, now) if one.is_target]
        if not targets:
            return None, 0
        counts = [self._times.cached_there(target, request) for target in targets]
        if not any(counts):
            return self._draw(request, targets), 0
        most = max(counts)
        return targets[counts.index(most)], most

    def _draw(self, request: DecodeRequest, sources: list[Connection]) -> Connection:
        """Which two, and which of equals, is chance. Of times that differ by less than they can be
        known, the one with less to do."""
        drawn = self._rng.sample(sources, min(2, len(sources)))
        others = [one for one in sources if one not in drawn]
        knowing = [one for one in others if self._times.cached_there(one, request)]

        def key(source: Connection) -> tuple[int, int]:
            lacking = len(request.token_ids) - self._times.cached_there(source, request)
            asked_s = max(SHORTEST_S, self._times.asked_s(source, request))
            return round(log(asked_s, KNOWN_RATIO)), source.load_token_count + lacking

        return min(drawn + knowing, key=key)
