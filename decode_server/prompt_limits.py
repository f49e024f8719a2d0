"""Prompts that are longer than any prefill server takes: an error, or computed here if allowed.

A server that is not connected yet, or not any more, may come and take a prompt: it is waited for
as any missing server is. Knows nothing of pages and of requests that a router bound to one server:
that server is asked, and refuses them itself.
"""

from __future__ import annotations

from decode_server.endings import Endings
from decode_server.prefill_peer import Phase, PrefillPeer
from decode_server.prefill_peers import PrefillPeers
from decode_server.recovery import FALLBACK_WAIT_S, PEER_WAIT_S
from decode_server.request import DecodeRequest

# How often the queue is looked through. A new request is looked at when it comes.
LOOK_S = 0.25
# Servers that an error message names.
NAMED_COUNT_MAX = 8


class PromptLimits:
    """missing_since: by request id, when a request was first found to wait for a server that is
    missing, although others are connected."""

    def __init__(self, peers: PrefillPeers, endings: Endings, *, may_fall_back: bool) -> None:
        self._peers = peers
        self._endings = endings
        self._may_fall_back = may_fall_back
        self._missing_since: dict[int, float] = {}
        self._next_look_at = 0.0

    def look(self, now: float) -> None:
        """Look at all that wait."""
        if now < self._next_look_at:
            return
        self._next_look_at = now + LOOK_S
        connected = self._peers.connected()
        connected_max = max((peer.request_token_max for peer in connected), default=0)
        queue = self._endings.queue
        self._missing_since = {i: at for i, at in self._missing_since.items() if i in queue}
        for request in list(queue):
            if len(request.token_ids) > connected_max:
                self.check(request, now)

    def check(self, request: DecodeRequest, now: float) -> None:
        """Decide about one request that waits."""
        if request.is_computed_here or request.bootstrap_link is not None:
            return
        token_count = len(request.token_ids)
        connected = self._peers.connected()
        if any(token_count <= peer.request_token_max for peer in connected):
            self._missing_since.pop(request.request_id, None)
            return
        missing = [peer for peer in self._peers.missing() if _may_take(peer, token_count)]
        if missing and connected:
            self._wait(request, missing, now)
        elif not missing and (known := self._known()):
            self._end(request, known, now)

    def _wait(self, request: DecodeRequest, missing: list[PrefillPeer], now: float) -> None:
        waited_s = now - self._missing_since.setdefault(request.request_id, now)
        if self._may_fall_back and waited_s >= FALLBACK_WAIT_S:
            request.is_computed_here = True
        elif waited_s >= PEER_WAIT_S:
            text = (
                f"no prefill server that takes {len(request.token_ids)} tokens could be used for "
                f"{PEER_WAIT_S:.0f} s: {', '.join(peer.in_words for peer in missing)}"
            )
            self._endings.fail(request, "no_prefill_server", text, 503, now)

    def _known(self) -> list[PrefillPeer]:
        """Those whose limits are known. One that refuses us counts as little as if it were away."""
        peers = self._peers.all()
        return [p for p in peers if p.request_token_max and p.phase is not Phase.REFUSED]

    def _end(self, request: DecodeRequest, known: list[PrefillPeer], now: float) -> None:
        if self._may_fall_back:
            request.is_computed_here = True
            return
        limits = [f"{peer.request_token_max} ({peer.link})" for peer in known[:NAMED_COUNT_MAX]]
        limits += [f"{len(known) - NAMED_COUNT_MAX} more"] if len(known) > NAMED_COUNT_MAX else []
        text = f"prefill servers take at most {', '.join(limits)}"
        if request.output_count:
            # Others needed its pages; its client asked for nothing that was not allowed.
            text = f"{len(request.token_ids)} tokens to compute again: {text}"
            self._endings.fail(request, "no_prefill_server", text, 503, now)
        else:
            text = f"prompt of {len(request.token_ids)} tokens: {text}"
            self._endings.fail(request, "bad_request", text, 400, now)


def _may_take(peer: PrefillPeer, token_count: int) -> bool:
    """Whether a server takes a prompt once it is connected; one that never was may take any."""
    return not peer.request_token_max or token_count <= peer.request_token_max
