"""What is done to a running pair; a new case is one more entry of `CASES`.

Knows nothing of how it is done.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.soak.plans import Side
from tests.soak.servers import Part

TRANSPORTS = ("shm", "stream", "ucx-tcp")
NETWORK = TRANSPORTS[1:]
WHOLE: tuple[Part, ...] = tuple(Part)


class Act(StrEnum):
    """KILL: SIGKILL. FREEZE: SIGSTOP, and SIGCONT seconds later. RESTART: SIGTERM, which drains.
    STARVE: for seconds it may not open one more file or socket than it has. FILL_DISK: for seconds
    there is no room where both servers log and keep their sockets; FILL_MEMORY: in /dev/shm.
    CUT: for seconds nothing passes between the servers."""

    KILL = "kill"
    FREEZE = "freeze"
    RESTART = "restart"
    STARVE = "starve"
    FILL_DISK = "fill-disk"
    FILL_MEMORY = "fill-memory"
    CUT = "cut"


class Scene(StrEnum):
    """Where a pair lives. PLAIN: on a machine with room. CROWDED: its pools hold a request or two
    of all that ask. FAR: the servers reach each other over a link with delay and loss."""

    PLAIN = "plain"
    CROWDED = "crowded"
    FAR = "far"


class Phase(StrEnum):
    """What a request, or for HANDSHAKE the pair, is doing. SETTLED: its cache has arrived and its
    client has the first token and no more. RETURN: it has ended, and its cache goes back."""

    HANDSHAKE = "handshake"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    SETTLED = "settled"
    DECODE = "decode"
    RETURN = "return"


_WORKER, _SCHEDULER = (Part.WORKER,), (Part.SCHEDULER,)


@dataclass(frozen=True, slots=True)
class Fault:
    """One act, `after_s` from the moment the case begins, on some processes of one server; those
    that strike no process have no `parts`. aim: strikes when something is in that phase."""

    act: Act
    side: Side = Side.DECODE
    parts: tuple[Part, ...] = ()
    after_s: float = 0.0
    aim: Phase | None = None

    @property
    def ends_server(self) -> bool:
        """A scheduler that is killed is followed by another one."""
        return self.act in (Act.KILL, Act.RESTART) and self.parts != _SCHEDULER

    @property
    def cuts_connections(self) -> bool:
        """Whether a frontend has no time to answer: it ends with its supervisor."""
        return self.act is Act.KILL and bool({Part.FRONTEND, Part.SUPERVISOR} & set(self.parts))

    @property
    def closes_port(self) -> bool:
        """Whether nobody may be there to listen. Without a file to open, a frontend can do no more
        with a new connection than close it."""
        return self.ends_server or (self.act is Act.STARVE and Part.FRONTEND in self.parts)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    faults: tuple[Fault, ...]
    transports: tuple[str, ...] = TRANSPORTS
    scene: Scene = Scene.PLAIN

    def restart_count(self, side: Side) -> int:
        """How often the server of a side ends by our doing."""
        return sum(fault.ends_server for fault in self.faults if fault.side is side)

    @property
    def starts_in_vain(self) -> bool:
        """Whether a server is started where there is no room for it, as often as it takes."""
        fills = any(fault.act in (Act.FILL_DISK, Act.FILL_MEMORY) for fault in self.faults)
        return fills and any(fault.ends_server for fault in self.faults)

    @property
    def needs_root(self) -> bool:
        """Whether file systems or networks of its own are needed."""
        needing = {Act.FILL_DISK, Act.FILL_MEMORY, Act.CUT}
        return self.scene is Scene.FAR or any(fault.act in needing for fault in self.faults)


def _on_either_side(
    act: Act,
    parts: tuple[Part, ...],
    name: str,
    transports: tuple[str, ...] = TRANSPORTS,
    scene: Scene = Scene.PLAIN,
) -> Iterator[Case]:
    """The same fault for the prefill and for the decode server."""
    prefix = "" if scene is Scene.PLAIN else f"{scene}-"
    for side in Side:
        yield Case(f"{prefix}{act}-{side}-{name}", (Fault(act, side, parts),), transports, scene)


def _in_handshake(first: Side, act: Act, second: Side, parts: tuple[Part, ...], name: str) -> Case:
    """A server is killed; when its successor shakes hands, a fault strikes again."""
    return Case(
        f"{act}-{second}-{name}-as-{first}-comes-back",
        (Fault(Act.KILL, first, WHOLE), Fault(act, second, parts, aim=Phase.HANDSHAKE)),
    )


_FREEZE_WRITER = Fault(Act.FREEZE, Side.PREFILL, _WORKER)

CASES: tuple[Case, ...] = (
    *_on_either_side(Act.KILL, _WORKER, "worker"),
    *_on_either_side(Act.KILL, _SCHEDULER, "scheduler"),
    *_on_either_side(Act.KILL, (Part.FRONTEND,), "frontend"),
    *_on_either_side(Act.KILL, (Part.SUPERVISOR,), "supervisor", ("shm",)),
    *_on_either_side(Act.KILL, WHOLE, "server"),
    *_on_either_side(Act.FREEZE, _WORKER, "worker"),
    *_on_either_side(Act.FREEZE, _SCHEDULER, "scheduler"),
    *_on_either_side(Act.FREEZE, (Part.FRONTEND,), "frontend", ("shm",)),
    *_on_either_side(Act.FREEZE, WHOLE, "server"),
    *_on_either_side(Act.RESTART, (Part.SUPERVISOR,), "server"),
    *_on_either_side(Act.STARVE, (Part.FRONTEND,), "frontend", ("shm",)),
    *_on_either_side(Act.STARVE, (Part.SCHEDULER, Part.WORKER), "engine"),
    Case(
        "freeze-prefill-worker-then-kill-it",
        (_FREEZE_WRITER, Fault(Act.KILL, Side.PREFILL, _WORKER, after_s=1.5)),
    ),
    Case(
        "freeze-prefill-worker-then-kill-decode-server",
        (_FREEZE_WRITER, Fault(Act.KILL, Side.DECODE, WHOLE, after_s=1.0)),
    ),
    Case(
        "kill-both-servers",
        (Fault(Act.KILL, Side.PREFILL, WHOLE), Fault(Act.KILL, Side.DECODE, WHOLE, after_s=0.5)),
    ),
    _in_handshake(Side.DECODE, Act.KILL, Side.PREFILL, _WORKER, "worker"),
    _in_handshake(Side.DECODE, Act.FREEZE, Side.DECODE, _WORKER, "worker"),
    _in_handshake(Side.PREFILL, Act.KILL, Side.DECODE, _WORKER, "worker"),
    _in_handshake(Side.PREFILL, Act.FREEZE, Side.PREFILL, _WORKER, "worker"),
    Case("fill-disk", (Fault(Act.FILL_DISK),)),
    Case(
        "fill-disk-then-kill-decode-server",
        (Fault(Act.FILL_DISK), Fault(Act.KILL, Side.DECODE, WHOLE, after_s=0.5)),
        NETWORK,
    ),
    Case("fill-memory", (Fault(Act.FILL_MEMORY),), ("shm",)),
    # The peers give each other up and shake hands anew where there is no room for it.
    Case(
        "fill-memory-then-freeze-prefill-scheduler",
        (Fault(Act.FILL_MEMORY), Fault(Act.FREEZE, Side.PREFILL, _SCHEDULER)),
        ("shm",),
    ),
    Case(
        "fill-memory-then-kill-prefill-server",
        (Fault(Act.FILL_MEMORY), Fault(Act.KILL, Side.PREFILL, WHOLE, after_s=0.5)),
        ("shm",),
    ),
    *_on_either_side(Act.KILL, _WORKER, "worker", scene=Scene.CROWDED),
    *_on_either_side(Act.FREEZE, _WORKER, "worker", scene=Scene.CROWDED),
    *_on_either_side(Act.FREEZE, _SCHEDULER, "scheduler", ("shm",), scene=Scene.CROWDED),
    Case("far-cut", (Fault(Act.CUT),), NETWORK, Scene.FAR),
    *_on_either_side(Act.KILL, _WORKER, "worker", NETWORK, Scene.FAR),
    *_on_either_side(Act.FREEZE, _WORKER, "worker", NETWORK, Scene.FAR),
    Case(
        "far-cut-then-kill-prefill-worker",
        (Fault(Act.CUT), Fault(Act.KILL, Side.PREFILL, _WORKER, after_s=0.5)),
        NETWORK,
        Scene.FAR,
    ),
)


def draw_schedule(cases: list[Case], fault_count: int, seed: str) -> list[Case]:
    """Cases in random order, each as often as the others, until they hold `fault_count` faults."""
    rng = random.Random(f"schedule {seed}")
    schedule: list[Case] = []
    round_: list[Case] = []
    while sum(len(case.faults) for case in schedule) < fault_count:
        round_ = round_ or rng.sample(cases, len(cases))
        schedule.append(round_.pop())
    return schedule


def find_cases(names: str) -> list[Case]:
    """Cases by comma-separated names, all for "". Raises: ValueError naming what is unknown."""
    by_name = {case.name: case for case in CASES}
    if not names:
        return list(CASES)
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise ValueError(f"--cases {unknown[0]}: must be of {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]
