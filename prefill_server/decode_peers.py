"""The decode servers that dialled this prefill server: handshake, connection, liveness.

    Hello -> WELCOMED -> Attach -> CONNECTING -> every rank connected -> CONNECTED
                              any failure or silence -> CLOSING -> every rank closed -> forgotten

A peer is bound to the link it said Hello on: whatever another link says in its name is refused, for
incarnation ids are shown to operators and prove nothing. A link speaks for one process at a time.

Knows nothing of requests: it says which peer was lost, and the scheduler ends that peer's requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from common.config import TransferMode, Verify
from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.planner.pairing import rank_pairs
from common.protocol.codec import decode_layout
from common.protocol.frontend import PeerState
from common.protocol.handshake import (
    agree_transfer_mode,
    agree_verify,
    announced_page_counts,
    compare_fingerprints,
    compare_layouts,
    compare_transfer_mode,
    compare_versions,
)
from common.protocol.hosts import peer_processes
from common.protocol.peer import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Attach,
    Attached,
    Detached,
    Heartbeat,
    Hello,
    Refuse,
)
from common.protocol.worker import ClosePeer, ConnectPeer, PeerConnected
from common.scheduling.facts import Pace, ServerFacts
from common.scheduling.introductions import welcome_of
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import (
    REFUSED_RETRY_S,
    STOPPING_REASON,
    Condition,
    Outbox,
    PeerLiveness,
    RankSet,
)
from prefill_server.credits import Credits

# Decode servers that may be connected at a time; each costs a UCX endpoint per pair of ranks.
PEER_COUNT_MAX = 256
# Refused decode servers that operators are shown, and for how long after their last attempt.
REFUSED_COUNT_MAX = 16
REFUSED_SHOWN_S = 3 * REFUSED_RETRY_S
REASON_COUNT_MAX = 64  # refused connections are told of in so many different words, then counted
SPOKEN_FOR = "incarnation: another link speaks for this process already"


def shown_link(link: str) -> str:
    """Enough of a link's name to tell it from others; whoever knew all of it could take it over."""
    identity, dot, key = link.partition(".")
    return f"{identity[:10]}{dot}{key[:16]}"


class Phase(StrEnum):
    WELCOMED = "connecting"
    CONNECTING = "attaching"
    CONNECTED = "connected"
    CLOSING = "lost"


@dataclass(slots=True)
class DecodePeer:
    """One decode process. page_counts: pages per group that it has. attachment: of its Attach.

    name: what operators call it; no other peer's. http_address: of its page.
    transfer_mode: how caches travel there; transfer_notes: what its connections said of that.
    verify: how much of them it compares.
    """

    incarnation: str
    link: str
    layout: ServerLayout
    layout_bytes: bytes
    liveness: PeerLiveness
    phase: Phase = Phase.WELCOMED
    connected: RankSet = field(default_factory=lambda: RankSet(0))
    closed: RankSet = field(default_factory=lambda: RankSet(0))
    transports: list[str] = field(default_factory=list)
    transfer_mode: TransferMode = TransferMode.DIRECT
    transfer_notes: list[str] = field(default_factory=list)
    verify: Verify = Verify.OFF
    page_counts: tuple[int, ...] = ()
    attachment: int = 0
    detail: str = ""
    transfer_count: int = 0
    rank_pairs: list[tuple[int, int]] = field(default_factory=list)
    name: str = ""
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A decode process that was sent away; it asks again now and then."""

    incarnation: str
    link: str
    name: str
    detail: str
    asked_at: float


class DecodePeers:
    """Owner of every `DecodePeer`. request_token_max: the longest prompt that this server takes."""

    def __init__(
        self,
        facts: ServerFacts,
        pace: Pace,
        outbox: Outbox,
        credits: Credits,
        *,
        request_token_max: int,
    ) -> None:
        self._facts = facts
        self._credits = credits
        self._request_token_max = request_token_max
        self._pace = pace
        self._outbox = outbox
        self._peers: dict[str, DecodePeer] = {}
        self._refused: dict[str, RefusedPeer] = {}
        self._links_refused_for: set[str] = set()
        self._refused_lines = LogRateLimiter()
        self._lost_lines = LogRateLimiter()
        self.refused_count = 0
        self.lost_count = 0
        self.refused_link_count = 0

    def connected(self, incarnation: str, link: str) -> DecodePeer | None:
        peer = self._of(incarnation, link)
        return peer if peer is not None and peer.phase is Phase.CONNECTED else None

    @property
    def connected_ones(self) -> list[str]:
        return [p.incarnation for p in self._peers.values() if p.phase is Phase.CONNECTED]

    def _of(self, incarnation: str, link: str) -> DecodePeer | None:
        """The peer that a message is of, if it came on that peer's own link."""
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.link == link else None

    def on_link(self, link: str) -> str | None:
        """The process that speaks on a link, unless it is closing already."""
        for peer in self._peers.values():
            if peer.link == link and peer.phase is not Phase.CLOSING:
                return peer.incarnation
        return None

    def count_transfer(self, incarnation: str, change: int) -> None:
        """Keep the number of a peer's transfers that are shown to operators."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.transfer_count += change

    # ---- handshake -------------------------------------------------------------------------------

    def handle_hello(self, link: str, hello: Hello, now: float) -> str | None:
        """Welcome or refuse. Returns the incarnation of a peer that is lost by dialling anew."""
        known = self._peers.get(hello.incarnation)
        if known is not None and known.link != link and known.phase is Phase.CLOSING:
            return None  # it has dialled anew, and is welcome when it asks again
        if known is not None and known.link != link:
            # Either two names of ours are dialled by one process, or it lies. If it has dialled
            # anew, its old link falls silent and it is welcome when it asks again.
            self._refuse(link, hello.incarnation, hello.name, [SPOKEN_FOR], now)
            return None
        if known is not None and known.phase is Phase.WELCOMED:
            self._send_welcome(known)
            return None
        if known is not None:
            # It dropped what we are connected to: close our side; its next Hello starts afresh.
            is_lost = self.lose(hello.incarnation, "it dialled anew", now)
            return hello.incarnation if is_lost else None
        lost = self._lose_predecessor(link, now)
        differences, layout = self._differences(hello)
        if len(self._peers) >= PEER_COUNT_MAX:
            differences.append(f"peers: {PEER_COUNT_MAX} decode servers are connected already")
        if differences or layout is None:
            self._refuse(link, hello.incarnation, hello.name, differences, now)
            return lost
        self._refused.pop(hello.incarnation, None)
        peer = DecodePeer(hello.incarnation, link, layout, hello.layout, PeerLiveness.start(now))
        peer.transfer_mode = self._agree(hello)
        peer.verify = agree_verify(self._facts.verify, hello.verify)
        peer.rank_pairs = rank_pairs(self._facts.layout, layout)
        peer.name, peer.http_address = self._name_of(hello), hello.http_address
        self._peers[hello.incarnation] = peer
        processes = peer_processes(hello.host_ids, hello.pids, self._facts.host_ids)
        if processes.watched_pids:
            self._outbox.watch_processes(peer.incarnation, processes.watched_pids)
        self._send_welcome(peer)
        return lost

    def _name_of(self, hello: Hello) -> str:
        """A replica that was given another's name is told from it by its incarnation."""
        if hello.name and all(hello.name != peer.name for peer in self._peers.values()):
            return hello.name
        return f"{hello.name} {hello.incarnation}".lstrip()

    def _lose_predecessor(self, link: str, now: float) -> str | None:
        """Close the process that spoke on this link before; its incarnation if there was one."""
        incarnation = self.on_link(link)
        if incarnation is None:
            return None
        return incarnation if self.lose(incarnation, "another process took its link", now) else None

    def handle_link_refused(self, reason: str) -> None:
        """Somebody could not connect: counted, and told of once per reason."""
        self.refused_link_count += 1
        known = self._links_refused_for
        if reason not in known and len(known) < REASON_COUNT_MAX:
            known.add(reason)
            self._outbox.report(f"refused a connection: {reason}", is_warning=True)

    def _refuse(
        self, link: str, incarnation: str, name: str, differences: list[str], now: float
    ) -> None:
        self.refused_count += 1
        self._outbox.to_peer(link, Refuse(self._facts.incarnation, differences))
        detail = "; ".join(differences)
        known = self._refused.pop(incarnation, None)
        if known is None or known.detail != detail:
            text = f"refused decode server {name or incarnation} ({shown_link(link)}): {detail}"
            self._warn(self._refused_lines.admit(text, now))
        if len(self._refused) >= REFUSED_COUNT_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[incarnation] = RefusedPeer(incarnation, link, name, detail, now)

    def _warn(self, text: str) -> None:
        if text:
            self._outbox.report(text, is_warning=True)

    def _differences(self, hello: Hello) -> tuple[list[str], ServerLayout | None]:
        facts = self._facts
        differences = compare_versions(
            (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION), (hello.version_min, hello.version_max)
        )
        if hello.role != "decode":
            differences.append(f"role: expected decode, got {hello.role!r}")
        differences += compare_fingerprints(facts.fingerprint, hello.fingerprint)
        try:
            layout = decode_layout(hello.layout)
        except ProtocolError as error:
            return [*differences, f"layout: {error}"], None
        differences += compare_transfer_mode(facts.transfer_mode, hello.transfer_mode)
        differences += compare_layouts(facts.layout, layout, self._agree(hello))
        return differences, layout

    def _agree(self, hello: Hello) -> TransferMode:
        """How caches will travel; direct stands for no agreement, which is a difference."""
        return (
            agree_transfer_mode(self._facts.transfer_mode, hello.transfer_mode)
            or TransferMode.DIRECT
        )

    def _send_welcome(self, peer: DecodePeer) -> None:
        level = self._credits.tell(peer.incarnation)
        self._outbox.to_peer(peer.link, welcome_of(self._facts, self._request_token_max, level))

    def handle_attach(self, link: str, attach: Attach, now: float) -> None:
        """Connect every rank to the ranks it announced, if the announcement holds together."""
        peer = self._of(attach.incarnation, link)
        if attach.peer_incarnation != self._facts.incarnation or peer is None:
            self.detach_unknown(link, attach.incarnation)
            return
        if peer.phase is not Phase.WELCOMED:
            return
        peer.liveness.silence.hear()
        try:
            peer.page_counts = announced_page_counts(peer.layout, attach.ranks)
        except ProtocolError as error:
            self._refuse(link, peer.incarnation, peer.name, [str(error)], now)
            del self._peers[peer.incarnation]
            return
        peer.attachment = attach.attachment
        peer.phase = Phase.CONNECTING
        peer.connected = RankSet(self._facts.rank_count)
        self._outbox.to_workers(
            ConnectPeer(peer.incarnation, peer.layout_bytes, attach.ranks, peer.transfer_mode)
        )

    def handle_connected(self, message: PeerConnected, now: float) -> None:
        peer = self._peers.get(message.peer)
        if peer is None or peer.phase is not Phase.CONNECTING:
            return
        if message.transports:  # a rank that writes nothing there has no connection
            peer.transports.append(message.transports)
        peer.transfer_notes.append(message.transfer_mode)
        if peer.connected.add(message.rank):
            peer.phase = Phase.CONNECTED
            peer.liveness = PeerLiveness.start(now)
            transports = sorted(set(peer.transports))
            self._outbox.to_peer(
                peer.link,
                Attached(self._facts.incarnation, peer.incarnation, transports, peer.attachment),
            )
            self._outbox.report(
                f"decode server {peer.name} is connected over {', '.join(transports)}"
            )

    def detach_unknown(self, link: str, incarnation: str) -> None:
        """Tell somebody who thinks we are connected that we are not."""
        self._outbox.to_peer(link, Detached(self._facts.incarnation, incarnation, "not connected"))

    # ---- liveness --------------------------------------------------------------------------------

    def handle_heartbeat(self, link: str, beat: Heartbeat) -> None:
        peer = self._of(beat.incarnation, link)
        if peer is None or peer.phase is Phase.CLOSING:
            self.detach_unknown(link, beat.incarnation)
            return
        peer.liveness.apply_heartbeat(beat)

    def handle_detached(self, link: str, message: Detached, now: float) -> bool:
        """Close a peer that asks for it; False if it has no say in this."""
        is_ours = message.peer_incarnation == self._facts.incarnation
        if not is_ours or self._of(message.incarnation, link) is None:
            return False
        reason = message.reason if message.is_planned else f"it gave us up: {message.reason}"
        return self.lose(message.incarnation, reason, now, is_planned=message.is_planned)

    def leave(self) -> int:
        """This server stops: every peer is told. How many there were."""
        left = [peer for peer in self._peers.values() if peer.phase is not Phase.CLOSING]
        for peer in left:
            told = Detached(
                self._facts.incarnation, peer.incarnation, STOPPING_REASON, is_planned=True
            )
            self._outbox.to_peer(peer.link, told)
        return len(left)

    def lose(self, incarnation: str, reason: str, now: float, *, is_planned: bool = False) -> bool:
        """Close a peer; False if it was closing already or is unknown.

        is_planned: it has said that it stops, which is nobody's fault.
        """
        peer = self._peers.get(incarnation)
        if peer is None or peer.phase is Phase.CLOSING:
            return False
        self._outbox.to_peer(peer.link, Detached(self._facts.incarnation, incarnation, reason))
        peer.detail = reason
        self.lost_count += not is_planned
        text = f"lost decode server {peer.name}: {reason}"
        if is_planned:
            text = f"decode server {peer.name} has stopped: {reason}"
        if peer.phase is Phase.WELCOMED:
            # Whoever says Hello and no more can be many.
            self._warn(self._lost_lines.admit(text, now))
            del self._peers[incarnation]
            return True
        self._outbox.report(text, is_warning=not is_planned)
        peer.phase = Phase.CLOSING
        peer.closed = RankSet(self._facts.rank_count)
        self._outbox.to_workers(ClosePeer(incarnation))
        return True

    def handle_closed(self, incarnation: str, rank: int) -> None:
        peer = self._peers.get(incarnation)
        if peer is not None and peer.phase is Phase.CLOSING and peer.closed.add(rank):
            del self._peers[incarnation]

    def lost(self, now: float) -> list[tuple[str, str]]:
        """Peers that are silent or can't go on, and why."""
        open_peers = [peer for peer in self._peers.values() if peer.phase is not Phase.CLOSING]
        reasons = [(p.incarnation, p.liveness.why_lost(now, self._pace)) for p in open_peers]
        return [(incarnation, reason) for incarnation, reason in reasons if reason]

    def send_heartbeats(self, now: float, condition: Condition) -> None:
        for refused in list(self._refused.values()):
            if now - refused.asked_at > REFUSED_SHOWN_S:
                del self._refused[refused.incarnation]
        for peer in self._peers.values():
            if peer.phase is Phase.CLOSING:
                continue
            incarnation = self._facts.incarnation
            beat = peer.liveness.next_heartbeat(incarnation, now, self._pace, condition)
            if beat is not None:
                level = self._credits.tell(peer.incarnation)
                self._outbox.to_peer(peer.link, msgspec.structs.replace(beat, credits=level))

    def hurry(self, incarnations: Iterable[str] | None = None) -> None:
        """There is news: these, or all, are told at the next occasion."""
        for incarnation in list(self._peers) if incarnations is None else incarnations:
            self._peers[incarnation].liveness.next_beat_at = 0.0

    def states(self) -> list[PeerState]:
        """For operators; those that were refused lately come last."""
        known = [
            PeerState(
                address=shown_link(peer.link),
                incarnation=peer.incarnation,
                state=str(peer.phase),
                detail=peer.detail,
                transports=sorted(set(peer.transports)),
                transfer_mode=sorted(set(peer.transfer_notes)),
                verify=str(peer.verify),
                tp_size=peer.layout.tp_size,
                pp_size=len(peer.layout.stages),
                page_size=peer.layout.page_size,
                in_flight_count=peer.transfer_count,
                rank_pairs=peer.rank_pairs,
                name=peer.name,
                http_address=peer.http_address,
            )
            for peer in self._peers.values()
        ]
        refused = [
            PeerState(
                shown_link(peer.link), peer.incarnation, "refused", peer.detail, name=peer.name
            )
            for peer in self._refused.values()
        ]
        return known + refused
