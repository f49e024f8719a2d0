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

TRANSPORTS = ("shm", "tcp")
WHOLE: tuple[Part, ...] = tuple(Part)


class Act(StrEnum):
    """KILL: SIGKILL. FREEZE: SIGSTOP, and SIGCONT seconds later. RESTART: SIGTERM, which drains.
    STARVE: for seconds it may not open one more file or socket than it has."""

    KILL = "kill"
    FREEZE = "freeze"
    RESTART = "restart"
    STARVE = "starve"


@dataclass(frozen=True, slots=True)
class Fault:
    """One act on some processes of one server, `after_s` from the moment the case begins."""

    act: Act
    side: Side
    parts: tuple[Part, ...]
    after_s: float = 0.0

    @property
    def ends_server(self) -> bool:
        return self.act in (Act.KILL, Act.RESTART)

    @property
    def cuts_connections(self) -> bool:
        """Whether a frontend has no time to answer: it ends with its supervisor."""
        return self.act is Act.KILL and bool({Part.FRONTEND, Part.SUPERVISOR} & set(self.parts))


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    faults: tuple[Fault, ...]
    transports: tuple[str, ...] = TRANSPORTS

    def restart_count(self, side: Side) -> int:
        """How often the server of a side ends by our doing."""
        return sum(fault.ends_server for fault in self.faults if fault.side is side)


def _on_either_side(
    act: Act, parts: tuple[Part, ...], name: str, transports: tuple[str, ...] = TRANSPORTS
) -> Iterator[Case]:
    """The same fault for the prefill and for the decode server."""
    for side in Side:
        yield Case(f"{act}-{side}-{name}", (Fault(act, side, parts),), transports)


CASES: tuple[Case, ...] = (
    *_on_either_side(Act.KILL, (Part.WORKER,), "worker"),
    *_on_either_side(Act.KILL, (Part.SCHEDULER,), "scheduler"),
    *_on_either_side(Act.KILL, (Part.FRONTEND,), "frontend"),
    *_on_either_side(Act.KILL, (Part.SUPERVISOR,), "supervisor", ("shm",)),
    *_on_either_side(Act.KILL, WHOLE, "server"),
    *_on_either_side(Act.FREEZE, (Part.WORKER,), "worker"),
    *_on_either_side(Act.FREEZE, (Part.SCHEDULER,), "scheduler"),
    *_on_either_side(Act.FREEZE, (Part.FRONTEND,), "frontend", ("shm",)),
    *_on_either_side(Act.FREEZE, WHOLE, "server"),
    *_on_either_side(Act.RESTART, (Part.SUPERVISOR,), "server"),
    *_on_either_side(Act.STARVE, (Part.FRONTEND,), "frontend", ("shm",)),
    *_on_either_side(Act.STARVE, (Part.SCHEDULER, Part.WORKER), "engine"),
    Case(
        "freeze-prefill-worker-then-kill-it",
        (
            Fault(Act.FREEZE, Side.PREFILL, (Part.WORKER,)),
            Fault(Act.KILL, Side.PREFILL, (Part.WORKER,), after_s=1.5),
        ),
    ),
    Case(
        "freeze-prefill-worker-then-kill-decode-server",
        (
            Fault(Act.FREEZE, Side.PREFILL, (Part.WORKER,)),
            Fault(Act.KILL, Side.DECODE, WHOLE, after_s=1.0),
        ),
    ),
    Case(
        "kill-both-servers",
        (Fault(Act.KILL, Side.PREFILL, WHOLE), Fault(Act.KILL, Side.DECODE, WHOLE, after_s=0.5)),
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
