"""What a scheduler core is told and what it asks for. Values only; the loop around it does I/O.

A core is driven by two calls: `handle(event, now)` and `schedule(now)`, both returning effects,
with `now` in seconds of a monotonic clock. The same events give the same effects.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.frontend import FrontendToScheduler, SchedulerToFrontend
from common.protocol.peer import DecodeToPrefill, PrefillToDecode
from common.protocol.worker import SchedulerToWorker, WorkerToScheduler

PeerMessage = DecodeToPrefill | PrefillToDecode


@dataclass(frozen=True, slots=True)
class FromFrontend:
    message: FrontendToScheduler


@dataclass(frozen=True, slots=True)
class FromWorker:
    message: WorkerToScheduler


@dataclass(frozen=True, slots=True)
class FromPeer:
    """link: the decode server's name for an address it dialled, or the prefill server's name for a
    connection it accepted. A link says nothing of who is behind it; incarnation ids do."""

    link: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class ProcessesGone:
    """Every process that could write for this peer incarnation is dead (seen through a pidfd)."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """A connection came to nothing before a word was said. link: "" where somebody else dialled."""

    link: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """A connection that stood broke. is_refused: and nobody answers at its address now. Either is a
    hint: ZMQ makes the connection anew, and neither proves that anybody writes no more."""

    link: str
    is_refused: bool


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """Ranks of ours on this machine whose process is stopped by a signal; none once all run."""

    ranks: tuple[int, ...]


Event = (
    FromFrontend
    | FromWorker
    | FromPeer
    | Tick
    | ProcessesGone
    | LinkRefused
    | LinkBroke
    | WorkersStopped
)


@dataclass(frozen=True, slots=True)
class ToFrontend:
    message: SchedulerToFrontend


@dataclass(frozen=True, slots=True)
class ToWorkers:
    """The same message to every worker."""

    message: SchedulerToWorker


@dataclass(frozen=True, slots=True)
class ToPeer:
    link: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link to a prefill server's bootstrap address "host:port"; the link bears that name."""

    link: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close a dialled link for good."""

    link: str


@dataclass(frozen=True, slots=True)
class WatchProcesses:
    """Tell by `ProcessesGone` when these processes of this host have all ended."""

    incarnation: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the operator's log: what became of a peer."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This process can't go on; a new one can. The server ends with EXIT_START_AGAIN."""

    reason: str


Effect = GiveUp | ToFrontend | ToWorkers | ToPeer | Dial | HangUp | WatchProcesses | Report
