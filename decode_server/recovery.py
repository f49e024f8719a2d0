"""What becomes of requests whose transfer failed, whose server is missing or whose time is up:
another prefill server, this server itself where that is allowed, or one typed error.

Knows nothing of pages: those of a lost transfer are the receiver's.
"""

from __future__ import annotations

from common.protocol.peer import TransferFailed
from common.scheduling.transitions import DecodeEvent
from decode_server.endings import Endings
from decode_server.prefill_peer import Phase
from decode_server.prefill_peers import PrefillPeers
from decode_server.receiver import Receiver
from decode_server.request import DecodeRequest, Transfer

# How long a request waits for a prefill server when none is connected, before it is answered 503;
# long enough for a restarted one to come back.
PEER_WAIT_S = 10.0
# How often the queue is looked through for such requests.
PEER_LOOK_S = 0.25
# How long it waits before this server computes its prompt itself, if it may, or another one does
# what the missing one had done: a restarted prefill server is back by then.
FALLBACK_WAIT_S = 2.0
# Transfers of one request that fail in a row before the last failure is passed on.
ATTEMPT_COUNT_MAX = 3
# Failures that say something of the server that sent them; all others are about the request.
PEER_FAILURES = ("transfer_failed", "transfer_corrupted", "bad_logits")


class Recovery:
    """is_local: this server computes all prompts. may_fall_back: it may compute those that no
    prefill server can be found for."""

    def __init__(
        self,
        peers: PrefillPeers,
        receiver: Receiver,
        endings: Endings,
        *,
        is_local: bool,
        may_fall_back: bool,
    ) -> None:
        self._peers = peers
        self._receiver = receiver
        self._endings = endings
        self._is_local = is_local
        self._may_fall_back = may_fall_back
        self._absent_since: dict[str | None, float] = {}
        self._next_look_at = 0.0

    def lose(self, incarnation: str | None, now: float) -> None:
        """A peer is lost: its transfers go elsewhere, their pages wait for proof."""
        if incarnation is None:
            return
        for request in self._receiver.abandon_peer(incarnation):
            request.transfer = None
            self._retry(request, "peer_lost", "the prefill server was lost", 503, now, True)

    def handle_failed(self, transfer: Transfer, failed: TransferFailed, now: float) -> None:
        """A prefill server says that a transfer brought nothing."""
        request = transfer.request
        assert request is not None
        self._receiver.release(transfer)
        if failed.kind in PEER_FAILURES:
            self._peers.note_failure(transfer.link, now)
        request.transfer = None
        if failed.kind == "queue_full" and failed.is_retryable:
            # It took others at the same moment. Nothing was tried, so nothing has failed.
            self._peers.note_full(transfer.link)
            self._endings.wait_again(request, DecodeEvent.PEER_FAILED, now)
            return
        kind, status = failed.kind, failed.status
        if kind == "aborted":
            # Whoever waits here did not give up; to a router an "aborted" would read as an answer.
            kind, status = "other_half_aborted", 500
        self._retry(request, kind, failed.message, status, now, failed.is_retryable)

    def compute_again(self, transfer: Transfer, now: float) -> None:
        """A held cache is there, but the first token that came with it is not one that this request
        may have: its client asks for more than the prefill server was told."""
        request = transfer.request
        assert request is not None
        self._receiver.release(transfer)
        request.transfer = None
        text = "the first token of the held cache would end the output too early"
        self._retry(request, "unfit_token", text, 500, now, True)

    def _retry(
        self,
        request: DecodeRequest,
        kind: str,
        message: str,
        status: int,
        now: float,
        is_retryable: bool,
    ) -> None:
        """Try another prefill server, unless a router's room binds the request to this one. What
        was held and is lost is computed again."""
        if request.is_held and status != 400:
            self._endings.drop_hold(request)
            is_retryable = True
        is_bound = request.bootstrap_link is not None
        request.note_failed()
        is_last = request.failure_count >= ATTEMPT_COUNT_MAX
        if not is_retryable or is_bound or (is_last and not self._may_fall_back):
            self._endings.fail(request, kind, message, status, now)
            return
        request.is_computed_here = is_last
        self._endings.counters["retried"] += 1
        self._endings.wait_again(request, DecodeEvent.PEER_FAILED, now)

    def expire(self, now: float) -> None:
        """End what has run out of time; give up peers that can't go on."""
        for request_id in self._endings.deadlines.take_expired(now):
            request = self._endings.requests.get(request_id)
            if request is not None and request.deadline <= now:
                self._end_late(request, now)
        for link, reason in self._peers.lost(now):
            self.lose(self._peers.lose(link, reason), now)
        self._drop_lost_holds(now)
        if self._may_fall_back:
            self._fall_back(now)
        if not self._is_local:
            self._end_peerless(now)

    def _end_late(self, request: DecodeRequest, now: float) -> None:
        """Its time budget is used up. Who never began may find room elsewhere."""
        if request.requested_at:
            text = "the request's time budget is used up"
            self._endings.fail(request, "timed_out", text, 504, now)
            return
        ahead_count = len(self._endings.queue) - 1
        text = f"not begun within the request's time budget: {ahead_count} others wait"
        self._endings.fail(request, "overloaded", text, 503, now)

    def _drop_lost_holds(self, now: float) -> None:
        """Whoever has waited for the server that holds its cache long enough, or for one whose
        process is gone, gets it from any."""
        for request in self._endings.queue:
            bootstrap = request.bootstrap
            if bootstrap is None or not request.is_held:
                continue
            peer = None if self._is_local else self._peers.find(bootstrap)
            is_up = peer is not None and peer.phase is Phase.CONNECTED
            is_here = peer is not None and is_up and peer.incarnation == bootstrap.engine
            is_late = now - request.waiting_since >= FALLBACK_WAIT_S
            if not is_here and (is_up or is_late or self._is_local):
                self._endings.drop_hold(request)

    def _fall_back(self, now: float) -> None:
        """Whoever has waited for any prefill server long enough is computed here."""
        if any(peer.breaker.allows(now) for peer in self._peers.connected()):
            return
        for request in self._endings.queue:
            is_bound = request.bootstrap_link is not None
            if not is_bound and now - request.waiting_since >= FALLBACK_WAIT_S:
                request.is_computed_here = True

    def _end_peerless(self, now: float) -> None:
        """Answer requests that no prefill server was there for long enough.

        The time runs from when a server is first found missing and a request waits for it, however
        long it had waited for pages before.
        """
        links = {peer.link for peer in self._peers.connected()}
        self._absent_since = {
            address: since
            for address, since in self._absent_since.items()
            if not self._is_there(address, links)
        }
        if now < self._next_look_at:
            return
        self._next_look_at = now + PEER_LOOK_S
        absent_since: dict[str | None, float] = {}
        for request in list(self._endings.queue):
            address = self._address_of(request)
            if request.is_computed_here or self._is_there(address, links):
                continue
            absent_since[address] = self._absent_since.get(address, now)
            if now - max(absent_since[address], request.waiting_since) >= PEER_WAIT_S:
                found = self._peers.in_words(address)
                text = f"no prefill server could be used for {PEER_WAIT_S:.0f} s: {found}"
                self._endings.fail(request, "no_prefill_server", text, 503, now)
        self._absent_since = absent_since

    def _address_of(self, request: DecodeRequest) -> str | None:
        """Of the one prefill server that a request waits for, dialled if need be; None if any can
        serve it, as any can compute a held cache again."""
        if request.is_held:
            return None
        if request.bootstrap is not None and request.bootstrap_link is not None:
            self._peers.find(request.bootstrap)
        return request.bootstrap_link

    def _is_there(self, address: str | None, links: set[str]) -> bool:
        """links: of all prefill servers that can be asked."""
        return bool(links) if address is None else self._peers.resolve(address) in links
