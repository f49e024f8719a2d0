"""What a scheduler core is told and what it asks for. Values only; the loop around it does I/O.

A core is driven by two calls: `handle(event, now)` and `schedule(now)`, both returning effects,
with `now` in seconds of a monotonic clock. The same events give the same effects. Structs and not
dataclasses, because several are made for every message, and these are made five times as fast.
"""

from __future__ import annotations

import msgspec

from common.protocol.frontend import Command, ToldFrontend
from common.protocol.peer import PeerMessage
from common.protocol.worker import SchedulerToWorker, WorkerReport


class FromFrontend(msgspec.Struct, frozen=True):
    message: Command


class FromWorker(msgspec.Struct, frozen=True):
    message: WorkerReport


class FromPeer(msgspec.Struct, frozen=True):
    """link: the decode server's name for an address it dialled, or the prefill server's name for a
    connection it accepted. A link says nothing of who is behind it; incarnation ids do. host: where
    a Hello came from."""

    link: str
    message: PeerMessage
    host: str = ""


class UnreadableRequest(msgspec.Struct, frozen=True):
    """A reservation of which no more can be read than which one it is.

    problem: why not; the sender is told.
    """

    link: str
    transfer_id: int
    incarnation: str
    problem: str


class Tick(msgspec.Struct, frozen=True):
    """Time passed; deadlines are looked at."""


class ProcessesGone(msgspec.Struct, frozen=True):
    """Every process that could write for this peer incarnation is dead (seen through a pidfd)."""

    incarnation: str


class LinkRefused(msgspec.Struct, frozen=True):
    """A connection failed before its first message. link: "" where the other side dialled."""

    link: str
    reason: str


class LinkDropped(msgspec.Struct, frozen=True):
    """A link that said nothing but nonsense is not listened to any more; one that we dialled is
    closed. The other side may dial again, and that is another link."""

    link: str
    reason: str


class LinkBroke(msgspec.Struct, frozen=True):
    """A connection that stood broke. is_refused: its address refuses new ones. Either is a
    hint: ZMQ makes the connection anew, and neither proves that anybody writes no more."""

    link: str
    is_refused: bool


class WorkersStopped(msgspec.Struct, frozen=True):
    """Ranks of ours on this machine whose process is stopped by a signal; none once all run."""

    ranks: tuple[int, ...]


class FrontendBehind(msgspec.Struct, frozen=True):
    """So much output waits for the frontend that no more may be computed; or all of it has left."""

    is_behind: bool


class DrainEnded(msgspec.Struct, frozen=True):
    """Another scheduler is to take the workers on. What is left ends now, each transfer with its
    last message; clients are answered by whoever asks for their requests again."""


class Stopping(msgspec.Struct, frozen=True):
    """This server was told to end, and does so now: whatever is left is given up."""


Event = (
    FromFrontend
    | FromWorker
    | FromPeer
    | UnreadableRequest
    | Tick
    | ProcessesGone
    | LinkRefused
    | LinkDropped
    | LinkBroke
    | WorkersStopped
    | FrontendBehind
    | DrainEnded
    | Stopping
)


class ToFrontend(msgspec.Struct, frozen=True):
    message: ToldFrontend


class ToWorkers(msgspec.Struct, frozen=True):
    """The same message to every worker."""

    message: SchedulerToWorker


class ToPeer(msgspec.Struct, frozen=True):
    link: str
    message: PeerMessage


class Dial(msgspec.Struct, frozen=True):
    """Open a link to a prefill server's bootstrap address "host:port"; the link bears that name."""

    link: str


class HangUp(msgspec.Struct, frozen=True):
    """Close a dialled link for good."""

    link: str


class WatchProcesses(msgspec.Struct, frozen=True):
    """Tell by `ProcessesGone` when these processes of this host have all ended."""

    incarnation: str
    pids: tuple[int, ...]


class Report(msgspec.Struct, frozen=True):
    """One line for the operator's log: what became of a peer."""

    text: str
    is_warning: bool = False


class GiveUp(msgspec.Struct, frozen=True):
    """This process can't go on; a new one can. The server ends with EXIT_START_AGAIN."""

    reason: str


Effect = GiveUp | ToFrontend | ToWorkers | ToPeer | Dial | HangUp | WatchProcesses | Report
