"""The prefill servers this decode server dials: handshake, connection, liveness, choice.

    DIALING --Welcome--> OPENING --every rank opened--> ATTACHING --Attached--> CONNECTED
       ^                     \\-----------\\--- failure or silence ---/
       |                                              |
       +------ every rank closed ------------------ CLOSING          REFUSED: asked again later

Knows nothing of requests. What happened to a peer is told to the scheduler by return values.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from common.config import TransferMode
from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.protocol.codec import decode_layout
from common.protocol.frontend import PeerState
from common.protocol.handshake import (
    agree_transfer_mode,
    compare_fingerprints,
    compare_layouts,
    compare_transfer_mode,
)
from common.protocol.peer import (
    Attach,
    Attached,
    Detached,
    Heartbeat,
    Refuse,
    Welcome,
)
from common.protocol.worker import ClosePeer, OpenPeer, PeerOpened
from common.request import Bootstrap
from common.scheduling.breaker import Breaker, BreakerState
from common.scheduling.facts import Pace, ServerFacts
from common.scheduling.introductions import hello_of
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import (
    HELLO_INTERVAL_S,
    REFUSED_RETRY_S,
    STOPPING_REASON,
    Condition,
    Outbox,
    PeerLiveness,
    RankSet,
)
from decode_server.prefill_peer import Phase, PrefillPeer

# Addresses that requests may name beyond the configured ones (a router's bootstrap_host).
NAMED_PEER_COUNT_MAX = 64
# Hellos on one link without an answer, which takes three seconds. A server that starts, or is in
# trouble, answers none either, and a new link costs it little.
UNANSWERED_HELLO_COUNT_MAX = 6
OPEN_PHASES = (Phase.OPENING, Phase.ATTACHING, Phase.CONNECTED)


class PrefillPeers:
    """Owner of every `PrefillPeer`."""

    def __init__(
        self, facts: ServerFacts, pace: Pace, links: list[str], outbox: Outbox, rng: random.Random
    ) -> None:
        self._facts = facts
        self._pace = pace
        self._rng = rng
        self._outbox = outbox
        self._peers: dict[str, PrefillPeer] = {}
        self._named_lines = LogRateLimiter()
        self.lost_count = 0
        self._attachment_count = 0
        for link in links:
            self._add(link, is_configured=True)

    def _add(self, link: str, *, is_configured: bool) -> PrefillPeer:
        peer = PrefillPeer(link, is_configured, PeerLiveness.start(0.0), Breaker(self._rng))
        self._peers[link] = peer
        self._outbox.dial(link)
        return peer

    # ---- asking ----------------------------------------------------------------------------------

    def get(self, link: str) -> PrefillPeer | None:
        return self._peers.get(link)

    def connected(self) -> list[PrefillPeer]:
        """Those that can be asked for transfers."""
        return [
            peer
            for peer in self._peers.values()
            if peer.phase is Phase.CONNECTED and not peer.liveness.is_draining
        ]

    def missing(self) -> list[PrefillPeer]:
        """Those that can't be asked now and may be soon; not those that do not fit."""
        connected = self.connected()
        return [p for p in self.all() if p.phase is not Phase.REFUSED and p not in connected]

    def all(self) -> list[PrefillPeer]:
        return list(self._peers.values())

    def ensure(self, link: str) -> PrefillPeer | None:
        """The peer at an address that a request names; None if there are too many of those."""
        peer = self._peers.get(link)
        if peer is not None:
            return peer
        named = [p for p in self._peers.values() if not p.is_configured]
        if len(named) >= NAMED_PEER_COUNT_MAX:
            idle = [p for p in named if p.phase in (Phase.DIALING, Phase.REFUSED)]
            if not idle:
                return None
            del self._peers[idle[0].link]
            self._outbox.hang_up(idle[0].link)
        return self._add(link, is_configured=False)

    def find(self, bootstrap: Bootstrap) -> PrefillPeer | None:
        """The peer that a request names, dialled if need be; None if it can't be."""
        named = f"{bootstrap.host}:{bootstrap.port}"
        link = self.resolve(named, bootstrap.engine)
        return self.ensure(link) if bootstrap.host or link != named else None

    def resolve(self, link: str, incarnation: str = "") -> str:
        """The link to ask the server at an address, which may be connected by another name:
        routers name it by theirs. incarnation: of the one process that will do, if it is known."""
        peer = self._peers.get(link)
        wanted = incarnation or (peer.twin if peer is not None else "")
        known = self._of_incarnation(wanted) if wanted else None
        if known is not None and known.phase is Phase.CONNECTED:
            return known.link
        return link

    # ---- handshake -------------------------------------------------------------------------------

    def handle_welcome(self, link: str, welcome: Welcome, now: float) -> None:
        peer = self._peers.get(link)
        if peer is None or peer.phase not in (Phase.DIALING, Phase.REFUSED):
            return
        differences = compare_fingerprints(self._facts.fingerprint, welcome.fingerprint)
        differences += compare_transfer_mode(self._facts.transfer_mode, welcome.transfer_mode)
        transfer_mode = (
            agree_transfer_mode(self._facts.transfer_mode, welcome.transfer_mode)
            or TransferMode.DIRECT
        )
        layout: ServerLayout | None = None
        try:
            layout = decode_layout(welcome.layout)
            differences += compare_layouts(self._facts.layout, layout, transfer_mode)
        except ProtocolError as error:
            differences.append(f"layout: {error}")
        if differences or layout is None:
            self._refuse(peer, "; ".join(differences), now)
            return
        other = self._of_incarnation(welcome.incarnation)
        if other is not None and other is not peer:
            # Workers know a peer by its incarnation, so it may stand for one open link only.
            if other.phase not in (Phase.DIALING, Phase.REFUSED):
                self._refuse(peer, f"incarnation: {other.link} is the same process", now)
                return
            other.incarnation = ""
        if peer.incarnation != welcome.incarnation:
            peer.breaker = Breaker(self._rng)  # a new process is not to blame for the old one
        peer.open(welcome, layout, transfer_mode, self._facts, now)
        if peer.processes.watched_pids:
            self._outbox.watch_processes(peer.incarnation, peer.processes.watched_pids)
        self._outbox.to_workers(OpenPeer(peer.incarnation, welcome.layout, link, transfer_mode))

    def handle_refuse(self, link: str, refuse: Refuse, now: float) -> str | None:
        """Returns the incarnation that must be closed, if we had opened something for it."""
        peer = self._peers.get(link)
        if peer is None:
            return None
        other = self._of_incarnation(refuse.incarnation)
        is_twin = other is not None and other is not peer and other.phase in OPEN_PHASES
        if other is not None and is_twin and peer.phase in (Phase.DIALING, Phase.REFUSED):
            self._note_twin(peer, other, now)
            return None
        detail = f"in the prefill server's words: {'; '.join(refuse.differences)}"
        if peer.phase in OPEN_PHASES:
            return self.lose(link, detail)
        self._refuse(peer, detail, now)
        return None

    def handle_link_refused(self, link: str, reason: str, now: float) -> None:
        """The connection can't be made. One that was there is missed by its silence."""
        peer = self._peers.get(link)
        if peer is None or peer.phase not in (Phase.DIALING, Phase.REFUSED):
            return
        if reason not in peer.link_failures:
            peer.link_failures.add(reason)
            self._warn(peer, f"can't connect to prefill server {link}: {reason}", now)
        peer.phase = Phase.REFUSED
        peer.detail = reason
        if not peer.must_redial:
            # ZMQ gives up a connection for good whose keys were refused.
            peer.must_redial = True
            peer.next_hello_at = now + REFUSED_RETRY_S

    def handle_link_dropped(self, link: str, reason: str, now: float) -> str | None:
        """The link is closed, for what came was nonsense; it is dialled anew. Returns the
        incarnation that must be closed, as `lose` does."""
        peer = self._peers.get(link)
        if peer is None:
            return None
        peer.must_redial = True
        if peer.phase in (Phase.DIALING, Phase.REFUSED):
            self._leave_alone(peer, reason, now)
        return self.lose(link, reason)

    def _note_twin(self, peer: PrefillPeer, other: PrefillPeer, now: float) -> None:
        """What is dialled by two names is connected by one of them, and found by both."""
        if peer.twin != other.incarnation:
            self._outbox.report(f"prefill server {peer.link} is {other.link} by another name")
        peer.twin = other.incarnation
        self._leave_alone(peer, f"is {other.link} by another name", now)

    def _refuse(self, peer: PrefillPeer, detail: str, now: float) -> None:
        if peer.phase is Phase.CLOSING:
            return
        if peer.phase is not Phase.REFUSED or peer.detail != detail:
            text = f"prefill server {peer.link} and this server refused each other: {detail}"
            self._warn(peer, text, now)
        self._leave_alone(peer, detail, now)

    def _leave_alone(self, peer: PrefillPeer, detail: str, now: float) -> None:
        peer.phase = Phase.REFUSED
        peer.detail = detail
        peer.unanswered_hello_count = 0
        peer.next_hello_at = now + REFUSED_RETRY_S

    def _warn(self, peer: PrefillPeer, text: str, now: float) -> None:
        """Clients may name as many addresses as they like."""
        line = text if peer.is_configured else self._named_lines.admit(text, now)
        if line:
            self._outbox.report(line, is_warning=True)

    def handle_opened(self, message: PeerOpened) -> None:
        peer = self._of_incarnation(message.peer)
        if peer is None or peer.phase is not Phase.OPENING:
            return
        peer.opened[message.rank] = message.descriptor
        if len(peer.opened) == self._facts.rank_count:
            peer.phase = Phase.ATTACHING
            ranks = [peer.opened[rank] for rank in sorted(peer.opened)]
            self._attachment_count += 1
            peer.attachment = self._attachment_count
            self._outbox.to_peer(
                peer.link,
                Attach(self._facts.incarnation, peer.incarnation, ranks, peer.attachment),
            )

    def handle_attached(self, link: str, attached: Attached, now: float) -> str | None:
        """The peer can be asked for transfers from now on; unless it has connected to what an
        earlier Attach said, and then `lose` is what comes of it."""
        peer = self._peers.get(link)
        is_expected = (
            peer is not None
            and peer.phase is Phase.ATTACHING
            and attached.incarnation == peer.incarnation
            and attached.peer_incarnation == self._facts.incarnation
        )
        if peer is None or not is_expected:
            return None
        if attached.attachment != peer.attachment:
            return self.lose(link, "it connected to what is closed by now")
        peer.phase = Phase.CONNECTED
        peer.is_proven = False
        peer.is_suspect = False
        peer.test_problem = ""
        peer.transports = list(attached.transports)
        peer.asked_token_count = 0
        peer.liveness = PeerLiveness.start(now)
        over = ", ".join(peer.transports)
        self._outbox.report(f"prefill server {peer.name} is connected over {over}")
        return None

    # ---- how transfers went ---------------------------------------------------------------------

    def note_success(self, link: str, now: float) -> None:
        peer = self._peers.get(link)
        if peer is not None:
            peer.succeeded_at = now
            peer.is_proven = True
            peer.test_problem = ""
            if peer.breaker.state is not BreakerState.CLOSED:
                self._outbox.report(f"prefill server {peer.name} works again")
            peer.breaker.note_success()

    def note_failure(self, link: str, now: float) -> None:
        """Too many in a row, and the peer is left alone for a while."""
        peer = self._peers.get(link)
        if peer is None:
            return
        before = peer.breaker.state
        peer.breaker.note_failure(now)
        if before is BreakerState.CLOSED and peer.breaker.state is BreakerState.OPEN:
            count = peer.breaker.failure_count
            text = f"prefill server {peer.name} failed {count} transfers in a row: left alone"
            self._outbox.report(text, is_warning=True)

    def note_full(self, link: str) -> None:
        """A peer had no room for a request: it is left alone until it says how much it has."""
        peer = self._peers.get(link)
        if peer is not None:
            peer.is_full = True

    # ---- liveness --------------------------------------------------------------------------------

    def handle_heartbeat(self, link: str, beat: Heartbeat) -> None:
        peer = self._peers.get(link)
        if peer is not None and peer.incarnation == beat.incarnation:
            peer.is_suspect = False
            peer.asked_token_count = 0
            peer.credits = beat.credits
            peer.is_full = False
            peer.liveness.apply_heartbeat(beat)

    def handle_break(
        self, link: str, *, is_refused: bool, is_asked: Callable[[str], bool]
    ) -> str | None:
        """Ask a peer whose connection broke for nothing until it is heard again. Give it up if
        nobody answers there, or if it was asked for something: what either side said meanwhile may
        be lost, and whoever waits for it waits in vain.

        is_asked: whether transfers of an incarnation are under way.
        Returns the incarnation that must be closed, as `lose` does.
        """
        peer = self._peers.get(link)
        if peer is None:
            return None
        peer.is_suspect = True
        if is_refused:
            return self.lose(link, "its connection broke, and nobody answers at its address")
        if is_asked(peer.incarnation):
            return self.lose(link, "its connection broke while transfers were under way")
        return None

    def handle_detached(self, link: str, message: Detached) -> str | None:
        if message.peer_incarnation != self._facts.incarnation:
            return None
        reason = message.reason if message.is_planned else f"it gave us up: {message.reason}"
        return self.lose(link, reason, is_planned=message.is_planned)

    def lose_incarnation(self, incarnation: str, reason: str) -> str | None:
        peer = self._of_incarnation(incarnation)
        return self.lose(peer.link, reason) if peer is not None else None

    def leave(self) -> int:
        """This server stops: every peer is told. How many there were."""
        left = [peer for peer in self._peers.values() if peer.phase in OPEN_PHASES]
        for peer in left:
            told = Detached(
                self._facts.incarnation, peer.incarnation, STOPPING_REASON, is_planned=True
            )
            self._outbox.to_peer(peer.link, told)
        return len(left)

    def lose(self, link: str, reason: str, *, is_planned: bool = False) -> str | None:
        """Close a peer; its incarnation, or None if there was nothing to close.

        is_planned: it has said that it stops, which is nobody's fault.
        """
        peer = self._peers.get(link)
        if peer is None or peer.phase not in OPEN_PHASES:
            return None
        peer.detail = reason
        if is_planned:
            self._outbox.report(f"prefill server {peer.name} has stopped: {reason}")
        else:
            self.lost_count += 1
            self._outbox.report(f"lost prefill server {peer.name}: {reason}", is_warning=True)
        peer.phase = Phase.CLOSING
        peer.closed = RankSet(self._facts.rank_count)
        self._outbox.to_peer(link, Detached(self._facts.incarnation, peer.incarnation, reason))
        self._outbox.to_workers(ClosePeer(peer.incarnation))
        return peer.incarnation

    def handle_closed(self, incarnation: str, rank: int) -> bool:
        """Whether every rank of ours has closed what this incarnation wrote through."""
        peer = self._of_incarnation(incarnation)
        if peer is None or peer.phase is not Phase.CLOSING or not peer.closed.add(rank):
            return False
        peer.phase = Phase.DIALING
        peer.next_hello_at = 0.0
        return True

    def is_fenced(self, incarnation: str) -> bool:
        """Whether it can't write any more now that every rank of ours has closed."""
        peer = self._of_incarnation(incarnation)
        return peer is not None and peer.is_fenced

    def note_gone(self, incarnation: str) -> bool:
        """The processes of a peer have ended. Whether that proves that nothing of it is written any
        more: its last bytes may lie in a connection that our workers have not closed yet."""
        peer = self._of_incarnation(incarnation)
        if peer is None or peer.phase is not Phase.CLOSING:
            return True
        peer.is_gone = True
        return False

    def lost(self, now: float) -> list[tuple[str, str]]:
        """Links whose peer is silent or can't go on, and why."""
        open_peers = [peer for peer in self._peers.values() if peer.phase in OPEN_PHASES]
        reasons = [(peer.link, peer.liveness.why_lost(now, self._pace)) for peer in open_peers]
        return [(link, reason) for link, reason in reasons if reason]

    def send_due(self, now: float, condition: Condition) -> None:
        """Hellos to whoever has not answered, heartbeats to the others.

        Whoever is in trouble dials nobody: it would only be given up again.
        """
        for peer in self._peers.values():
            if self.resolve(peer.link) != peer.link:
                continue  # asked again once its twin is gone
            if peer.phase in (Phase.DIALING, Phase.REFUSED):
                if now >= peer.next_hello_at and not condition.trouble:
                    self._redial_if_due(peer)
                    peer.next_hello_at = now + HELLO_INTERVAL_S
                    self._outbox.to_peer(peer.link, hello_of(self._facts))
            elif peer.phase is not Phase.CLOSING:
                incarnation = self._facts.incarnation
                beat = peer.liveness.next_heartbeat(incarnation, now, self._pace, condition)
                if beat is not None:
                    self._outbox.to_peer(peer.link, beat)

    def _redial_if_due(self, peer: PrefillPeer) -> None:
        """Before a Hello: on a link whose other end does not listen to it nothing is ever answered,
        and one that is dialled anew is another link."""
        if peer.must_redial or peer.unanswered_hello_count >= UNANSWERED_HELLO_COUNT_MAX:
            peer.must_redial = False
            peer.unanswered_hello_count = 0
            self._outbox.hang_up(peer.link)
            self._outbox.dial(peer.link)
        peer.unanswered_hello_count += 1

    def _of_incarnation(self, incarnation: str) -> PrefillPeer | None:
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                return peer
        return None

    def in_words(self, link: str | None) -> str:
        """What is the matter with the peer at an address, or with all, for an error message."""
        words = [peer.in_words for peer in self._peers.values() if link in (None, peer.link)]
        return ", ".join(words) or f"too many addresses are dialled to try {link}"

    def states(self, in_flight: dict[str, int]) -> list[PeerState]:
        """For operators. in_flight: link -> transfers under way."""
        return [peer.state(in_flight.get(peer.link, 0)) for peer in self._peers.values()]
