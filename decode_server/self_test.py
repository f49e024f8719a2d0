"""Whether prefill servers that nobody has asked for a while still can: a hand-over of one token.

It goes the way of every other: pages, a forward pass, puts over the same connection, the comparison
if one is configured, the last word. Only that no client waits for it and no counter sees it.
A connection is tried with puts of its own when it is made: the first one is due an interval later.
"""

from __future__ import annotations

from common.request import SamplingParams
from decode_server.endings import Endings
from decode_server.prefill_peers import PrefillPeer, PrefillPeers
from decode_server.request import DecodeRequest

# What it may take at a server that says it has nothing to do.
SELF_TEST_TIMEOUT_S = 10.0
# How soon one that failed is repeated.
SELF_TEST_RETRY_S = 5.0
TOKEN_ID = 0


class SelfTests:
    """interval_s: without a hand-over that went well, until one is tried; 0: never."""

    def __init__(self, peers: PrefillPeers, endings: Endings, interval_s: float) -> None:
        self._peers = peers
        self._endings = endings
        self._interval_s = interval_s
        self._under_way: set[str] = set()
        self._next_id = -1  # clients' requests have positive ones

    def look(self, now: float, *, may_begin: bool) -> None:
        """Take in how tests ended, and begin those that are due."""
        results, self._endings.tested = self._endings.tested, []
        for link, problem in results:
            self._under_way.discard(link)
            peer = self._peers.get(link)
            if peer is not None and problem:
                peer.test_problem = problem
                peer.succeeded_at = now - self._interval_s + SELF_TEST_RETRY_S
        if not self._interval_s or not may_begin:
            return
        for peer in self._peers.connected():
            is_due = now - peer.succeeded_at >= self._interval_s
            if is_due and not peer.liveness.load_tokens and peer.link not in self._under_way:
                self._begin(peer, now)

    def _begin(self, peer: PrefillPeer, now: float) -> None:
        request = DecodeRequest(
            request_id=self._next_id,
            token_ids=[TOKEN_ID],
            prompt_count=1,
            sampling=SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
            bootstrap=None,
            arrived_at=now,
            deadline=now + SELF_TEST_TIMEOUT_S,
            waiting_since=now,
            tested_link=peer.link,
        )
        self._next_id -= 1
        self._under_way.add(peer.link)
        self._endings.requests[request.request_id] = request
        self._endings.queue[request.request_id] = request
        self._endings.deadlines.add(request.request_id, request.deadline)
