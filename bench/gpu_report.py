"""The GPU check's report as a file: what was checked, the figures, on which card, at which commit.

Knows nothing of what is checked, nor of what a figure has to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from bench.machine import Machine
from bench.record import UnreadableRecord, replace_text

Figure = float | int | str
OK = "ok"
DEVICE, SHAPE = "cuda", "llama"


@dataclass(frozen=True, slots=True)
class CheckedSection:
    """checks: name -> "ok", or the fault. skipped: name -> why it was not checked.

    has_ended: false if the section was ended from outside; its figures up to then are here.
    """

    checks: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    has_ended: bool = False

    @property
    def failed(self) -> list[str]:
        """The faults, a line for each check that failed."""
        return [f"{name}: {told}" for name, told in self.checks.items() if told != OK]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One run of the check, or several of one machine and commit.

    started_at: UTC, ISO 8601. load: of the machine over the minute before. device, shape: as the
    check was asked for them; all but DEVICE and SHAPE is a rehearsal.
    """

    started_at: str
    commit: str | None
    machine: Machine
    load: float
    device: str
    shape: str
    sections: dict[str, CheckedSection] = field(default_factory=dict)

    @property
    def is_rehearsal(self) -> bool:
        """Whether its figures are of another device or model than they are named after."""
        return (self.device, self.shape) != (DEVICE, SHAPE)

    @property
    def is_good(self) -> bool:
        """Whether every section came to its end and nothing failed."""
        return all(one.has_ended and not one.failed for one in self.sections.values())


def read_check_report(path: Path) -> CheckReport:
    """Raises: UnreadableRecord."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckReport)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UnreadableRecord(f"{path}: {exc}") from exc


def write_check_report(path: Path, report: CheckReport) -> None:
    """Atomic: a reader sees the old report or the new one."""
    replace_text(path, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def join_check_reports(reports: Sequence[CheckReport]) -> CheckReport:
    """Calls of one card and commit as one report; of a section that is in several, the last counts.

    They may be of several machines of one kind, as a fresh one may be lent for every call.
    Raises: UnreadableRecord if they are of different kinds, versions or commits, or of a rehearsal.
    """
    first = reports[0]
    sections: dict[str, CheckedSection] = {}
    drivers: dict[str, None] = {}
    for report in reports:
        if report.is_rehearsal:
            told = f"--device {report.device} --shape {report.shape}"
            raise UnreadableRecord(f"the report of {report.started_at} is a rehearsal: {told}")
        if _kind_of(report) != _kind_of(first):
            raise UnreadableRecord(
                f"reports of one run must be of one kind of machine and one commit: "
                f"{first.machine} at {first.commit}, and {report.machine} at {report.commit}"
            )
        sections |= report.sections
        drivers[report.machine.driver] = None
    machine = replace(first.machine, driver=" and ".join(drivers))
    return replace(first, machine=machine, sections=sections)


def _kind_of(report: CheckReport) -> tuple[object, ...]:
    one = report.machine
    return report.commit, one.card, one.cores, one.python, one.torch, one.ucx, one.flashinfer
