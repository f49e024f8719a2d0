"""One prefill server as a decode server knows it: its address, and the process that answers there.

Knows nothing of how it came to be connected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.config import TransferMode, Verify
from common.layout.cache_layout import ServerLayout
from common.planner.pairing import rank_pairs
from common.protocol.descriptor import RankDescriptor
from common.protocol.frontend import PeerState
from common.protocol.handshake import agree_verify, expected_writers
from common.protocol.hosts import PeerProcesses, peer_processes
from common.protocol.peer import Welcome
from common.scheduling.breaker import Breaker
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import PeerLiveness, RankSet
from common.transport.fences import is_fenced_by_close


class Phase(StrEnum):
    DIALING = "connecting"
    REFUSED = "refused"
    OPENING = "opening"
    ATTACHING = "attaching"
    CONNECTED = "connected"
    CLOSING = "lost"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """One address and the prefill process that answers there now.

    twin: the incarnation that answers here, where that process is connected by another name.
    is_proven: a transfer has gone well since it was connected. test_problem: how the last
    self-test failed, "" if nothing has failed since the last transfer that went well.
    is_suspect: its connection broke, and it has not been heard since.
    is_gone: those of its processes that are watched have ended.
    request_token_max: the longest prompt that it takes, or took when it was last connected; 0 if
    it never was.
    given_name, http_address: in its own words.
    attachment: number of the last Attach that it was sent.
    must_redial: its link is of no use any more, and dialled anew before the next Hello.
    unanswered_hello_count: on this link, since anything of a handshake was heard.
    asked_token_count: of the transfers that it was asked for since its last heartbeat.
    credits: requests that it may be asked for at a time, by its own word; None if it sets no limit.
    is_full: it had no room for a request, and has not been heard since.
    """

    link: str
    is_configured: bool
    liveness: PeerLiveness
    breaker: Breaker
    succeeded_at: float = 0.0
    is_proven: bool = False
    test_problem: str = ""
    test_failed_at: float = 0.0
    is_suspect: bool = False
    attachment: int = 0
    asked_token_count: int = 0
    credits: int | None = None
    is_full: bool = False
    phase: Phase = Phase.DIALING
    next_hello_at: float = 0.0
    incarnation: str = ""
    layout: ServerLayout | None = None
    layout_bytes: bytes = b""
    request_token_max: int = 0
    writers: list[int] = field(default_factory=list)
    rank_pairs: list[tuple[int, int]] = field(default_factory=list)
    processes: PeerProcesses = field(default_factory=PeerProcesses)
    opened: dict[int, RankDescriptor] = field(default_factory=dict)
    closed: RankSet = field(default_factory=lambda: RankSet(0))
    is_gone: bool = False
    transports: list[str] = field(default_factory=list)
    transfer_mode: TransferMode = TransferMode.DIRECT
    verify: Verify = Verify.OFF
    detail: str = ""
    link_failures: set[str] = field(default_factory=set)
    must_redial: bool = False
    unanswered_hello_count: int = 0
    twin: str = ""
    given_name: str = ""
    http_address: str = ""

    @property
    def name(self) -> str:
        """What operators call it: its address in our settings, and the name that it was given."""
        is_given = self.given_name not in ("", self.http_address)
        return f"{self.given_name} ({self.link})" if is_given else self.link

    @property
    def is_fenced(self) -> bool:
        """Whether it can't write any more, all that it writes through here being closed.

        That keeps out what passes a socket or a queue pair of ours, as all from another machine
        does; a process that could map our memory must have ended. A peer that was lost before it
        said by what it writes has tried its lanes at most.
        """
        if self.is_gone and not self.processes.has_unwatched:
            return True
        if not self.transports:
            return self.processes.is_elsewhere
        return is_fenced_by_close(self.transports)

    @property
    def load_tokens(self) -> int:
        """Prompt tokens that it has to compute: by its own word, and asked for since."""
        return self.liveness.queued_token_count + self.asked_token_count

    def has_room(self, open_count: int) -> bool:
        """Whether it takes another request. open_count: of those that it was asked for."""
        return not self.is_full and (self.credits is None or open_count < self.credits)

    def open(
        self,
        welcome: Welcome,
        layout: ServerLayout,
        transfer_mode: TransferMode,
        facts: ServerFacts,
        now: float,
    ) -> None:
        """Take in who answers here. layout, transfer_mode: as agreed; facts: of this server."""
        self.twin = ""
        self.incarnation = welcome.incarnation
        self.given_name = welcome.name
        self.http_address = welcome.http_address
        self.layout = layout
        self.layout_bytes = welcome.layout
        self.transfer_mode = transfer_mode
        self.verify = agree_verify(facts.verify, welcome.verify)
        self.request_token_max = welcome.request_token_max
        self.credits = welcome.credits
        self.is_full = False
        self.writers = expected_writers(layout, facts.layout)
        self.rank_pairs = rank_pairs(layout, facts.layout)
        self.processes = peer_processes(welcome.host_ids, welcome.pids, facts.host_ids)
        self.liveness = PeerLiveness.start(now)
        self.opened = {}
        self.is_gone = False
        self.transports = []
        self.link_failures = set()
        self.must_redial = False
        self.unanswered_hello_count = 0
        self.detail = ""
        self.phase = Phase.OPENING

    @property
    def in_words(self) -> str:
        """What is the matter with it, for an error message."""
        return f"{self.link} {self.phase}{f' ({self.detail})' if self.detail else ''}"

    def note_asked(self, token_count: int, now: float) -> None:
        """A transfer is asked of it."""
        self.breaker.note_asked(now)
        self.asked_token_count += token_count

    def state(self, in_flight_count: int) -> PeerState:
        """For operators. in_flight_count: transfers under way."""
        layout = self.layout
        return PeerState(
            address=self.link,
            incarnation=self.incarnation,
            state=str(self.phase),
            detail=self.detail or self.test_problem,
            transports=list(self.transports),
            transfer_mode=[str(self.transfer_mode)] if layout is not None else [],
            verify=str(self.verify) if layout is not None else "",
            tp_size=layout.tp_size if layout is not None else 0,
            pp_size=len(layout.stages) if layout is not None else 0,
            page_size=layout.page_size if layout is not None else 0,
            in_flight_count=in_flight_count,
            breaker=str(self.breaker.state),
            breaker_open_count=self.breaker.open_count,
            is_self_test_failing=bool(self.test_problem),
            rank_pairs=self.rank_pairs,
            name=self.name,
            http_address=self.http_address,
        )
