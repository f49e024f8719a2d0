"""One prefill server as a decode server knows it: its address, and the process that answers there.

Knows nothing of how it came to be connected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.config import HandOver, Verify
from common.layout.cache_layout import ServerLayout
from common.protocol.descriptor import RankDescriptor
from common.scheduling.breaker import Breaker
from common.scheduling.peers import Liveness, RankSet


class Phase(StrEnum):
    DIALING = "connecting"
    REFUSED = "refused"
    OPENING = "opening"
    ATTACHING = "attaching"
    CONNECTED = "connected"
    CLOSING = "lost"


@dataclass(slots=True)
class PrefillPeer:
    """One address and the prefill process that answers there now.

    twin: the incarnation that answers here, where that process is connected by another name.
    is_proven: a hand-over has gone well since it was connected. test_problem: how the last
    self-test failed, "" if nothing has failed since the last hand-over that went well.
    is_suspect: its connection broke, and it has not been heard since.
    """

    link: str
    is_configured: bool
    liveness: Liveness
    breaker: Breaker
    succeeded_at: float = 0.0
    is_proven: bool = False
    test_problem: str = ""
    test_failed_at: float = 0.0
    is_suspect: bool = False
    phase: Phase = Phase.DIALING
    next_hello_at: float = 0.0
    incarnation: str = ""
    layout: ServerLayout | None = None
    layout_bytes: bytes = b""
    request_token_max: int = 0
    writers: list[int] = field(default_factory=list)
    rank_pairs: list[tuple[int, int]] = field(default_factory=list)
    pids: tuple[int, ...] = ()
    is_same_host: bool = False
    opened: dict[int, RankDescriptor] = field(default_factory=dict)
    closed: RankSet = field(default_factory=lambda: RankSet(0))
    is_gone: bool = False
    transports: list[str] = field(default_factory=list)
    hand_over: HandOver = HandOver.DIRECT
    verify: Verify = Verify.OFF
    detail: str = ""
    link_failures: set[str] = field(default_factory=set)
    must_redial: bool = False
    twin: str = ""

    @property
    def is_fenced_by_close(self) -> bool:
        """Whether destroying the worker it writes through keeps its late writes out.

        Over tcp the data passes our worker; over shared memory the peer's own CPU stores it.
        """
        return all(transport == "tcp" for transport in self.transports)
