"""Whether prefill servers can hand over, those that were connected just now and those that nobody
has asked for a while: a transfer of one token.

It goes the way of every other: pages, a forward pass, puts over the same connection, the comparison
if one is configured, the last word. Only that no client waits for it and no counter sees it.
"""

from __future__ import annotations

from common.request import SamplingParams
from decode_server.endings import Endings
from decode_server.prefill_peer import PrefillPeer
from decode_server.prefill_peers import PrefillPeers
from decode_server.request import DecodeRequest

# What it may take at a server that says it has nothing to do.
SELF_TEST_TIMEOUT_S = 10.0
# And at one that is busy: the first is not put off for that, but waits behind what is queued there.
BUSY_TEST_TIMEOUT_S = 60.0
# How soon one that failed is repeated.
SELF_TEST_RETRY_S = 5.0
TOKEN_ID = 0


class SelfTests:
    """interval_s: without a transfer that went well, until one is tried; 0: none ever is."""

    def __init__(self, peers: PrefillPeers, endings: Endings, interval_s: float) -> None:
        self._peers = peers
        self._endings = endings
        self._interval_s = interval_s
        self._under_way: set[str] = set()
        self._next_id = -1  # clients' requests have positive ones
        self.counters = dict.fromkeys(("self_tests", "self_tests_failed"), 0.0)

    def look(self, now: float, *, may_begin: bool) -> None:
        """Take in how tests ended, and begin those that are due."""
        results, self._endings.tested = self._endings.tested, []
        for link, problem in results:
            self._under_way.discard(link)
            self.counters["self_tests"] += 1
            self.counters["self_tests_failed"] += bool(problem)
            peer = self._peers.get(link)
            if peer is not None and problem:
                peer.test_problem = problem
                peer.test_failed_at = now
        if not self._interval_s or not may_begin:
            return
        for peer in self._peers.connected():
            is_wanted = not peer.is_proven or not peer.liveness.queued_token_count
            if is_wanted and now >= self._due_at(peer) and peer.link not in self._under_way:
                self._begin(peer, now)

    def has_passed(self, peer: PrefillPeer) -> bool:
        """Whether transfers from a peer are known to work, as far as that is asked for."""
        return not peer.test_problem and (peer.is_proven or not self._interval_s)

    def _due_at(self, peer: PrefillPeer) -> float:
        if peer.test_problem:
            return peer.test_failed_at + SELF_TEST_RETRY_S
        return peer.succeeded_at + self._interval_s if peer.is_proven else 0.0

    def _begin(self, peer: PrefillPeer, now: float) -> None:
        timeout_s = BUSY_TEST_TIMEOUT_S if peer.liveness.queued_token_count else SELF_TEST_TIMEOUT_S
        request = DecodeRequest(
            request_id=self._next_id,
            token_ids=[TOKEN_ID],
            prompt_count=1,
            sampling=SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
            bootstrap=None,
            arrived_at=now,
            deadline=now + timeout_s,
            waiting_since=now,
            tested_link=peer.link,
        )
        self._next_id -= 1
        self._under_way.add(peer.link)
        self._endings.requests[request.request_id] = request
        self._endings.queue.add(request)
        self._endings.deadlines.add(request.request_id, request.deadline)
