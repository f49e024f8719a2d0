"""Which prefill server a request is sent to: the one its router named, or one of those that can.

Of those, two are drawn and the one with less load is asked. Decode servers that heard the same
loads at the same time would otherwise all ask the same server. None is asked for more at a time
than it says it takes: what is over waits here, where it can still go to another one.

Knows nothing of pages.
"""

from __future__ import annotations

import random

from decode_server.prefill_peer import Phase, PrefillPeer
from decode_server.prefill_peers import PrefillPeers
from decode_server.receiver import Receiver
from decode_server.request import DecodeRequest


class Choice:
    def __init__(self, peers: PrefillPeers, receiver: Receiver, rng: random.Random) -> None:
        self._peers = peers
        self._receiver = receiver
        self._rng = rng

    def may_ask_any(self, now: float) -> bool:
        """Whether a request that may go anywhere could be sent somewhere, its length aside."""
        return any(self._may_ask(peer, now) for peer in self._peers.connected())

    def _may_ask(self, peer: PrefillPeer, now: float) -> bool:
        return peer.breaker.allows(now) and not peer.is_suspect and self._has_room(peer)

    def _has_room(self, peer: PrefillPeer) -> bool:
        return peer.has_room(self._receiver.open_count(peer.attachment))

    def choose(self, request: DecodeRequest, now: float) -> PrefillPeer | None:
        """The prefill server of a request: the one its router named, else one of the others that
        have not failed it, if there is any."""
        if request.tested_link:
            tested = self._peers.get(request.tested_link)
            is_up = tested is not None and tested.phase is Phase.CONNECTED
            return tested if tested is not None and is_up and self._has_room(tested) else None
        is_routed = request.bootstrap is not None
        if request.bootstrap is not None:
            named = self._peers.find(request.bootstrap)
            is_up = named is not None and named.phase is Phase.CONNECTED and not named.is_suspect
            if request.output_count == 0:  # its room is known there and nowhere else
                return named if is_up else None
            if named is not None and is_up and self._has_room(named):
                return named
        candidates = [
            peer
            for peer in self._peers.connected()
            if len(request.token_ids) <= peer.request_token_max and self._may_ask(peer, now)
        ]
        if not candidates:
            return None
        fresh = [peer for peer in candidates if peer.link not in request.tried_links]
        assert not is_routed or request.output_count > 0
        return self._draw(fresh or candidates)

    def _draw(self, peers: list[PrefillPeer]) -> PrefillPeer:
        """The less loaded of two; which two, and which of equals, is chance."""
        drawn = self._rng.sample(peers, min(2, len(peers)))
        return min(drawn, key=lambda peer: peer.load_tokens)
