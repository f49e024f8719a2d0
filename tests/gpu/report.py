"""What the GPU check found: checks that held or did not, figures, and what was not looked at.

All of it is in the file as soon as it is found, so that a run which is ended loses nothing. Knows
nothing of what is checked.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu_report import OK, CheckedSection, CheckReport, Figure, write_check_report

RUNS_TO_ITS_END = "runs to its end"


@dataclass(slots=True)
class Section:
    """One part of the report. checks: name -> "ok", or what is wrong.

    has_ended: false while it runs, and for ever if the process ended meanwhile.
    on_change: called after every finding.
    """

    name: str
    checks: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    has_ended: bool = False
    on_change: Callable[[], None] = lambda: None

    def check(self, name: str, is_so: bool, otherwise: str = "is not so") -> None:
        self.checks[name] = OK if is_so else otherwise
        say(f"  {'ok    ' if is_so else 'FAILED'} {name}{'' if is_so else f': {otherwise}'}")
        self.on_change()

    def figure(self, name: str, value: Figure) -> None:
        self.figures[name] = round(value, 6) if isinstance(value, float) else value
        say(f"         {name} = {self.figures[name]}")
        self.on_change()

    def skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        say(f"  SKIPPED {name}: {reason}")
        self.on_change()

    @property
    def has_failed(self) -> bool:
        return any(outcome != OK for outcome in self.checks.values())

    def as_checked(self) -> CheckedSection:
        return CheckedSection(
            dict(self.checks),
            dict(self.figures),
            dict(self.skipped),
            round(self.seconds, 1),
            self.has_ended,
        )


@dataclass(slots=True)
class Report:
    """The sections that this process ran, behind those that `begun` has already.

    path: where it is kept up to date; None: nowhere.
    """

    begun: CheckReport
    path: Path | None = None
    sections: list[Section] = field(default_factory=list)

    @contextmanager
    def section(self, name: str) -> Iterator[Section]:
        """An error inside is a check of the section that failed; the others still run."""
        section = Section(name, on_change=self.save)
        self.sections.append(section)
        say(f"{name}:")
        self.save()
        started_at = time.monotonic()
        try:
            yield section
        except Exception as error:  # noqa: BLE001 - whatever broke is the finding
            traceback.print_exc()
            section.check("runs to its end", False, f"{type(error).__name__}: {error}"[:500])
        section.seconds = time.monotonic() - started_at
        section.has_ended = True
        self.save()

    @property
    def has_failed(self) -> bool:
        return any(section.has_failed for section in self.sections)

    def as_checked(self) -> CheckReport:
        own = {section.name: section.as_checked() for section in self.sections}
        return replace(self.begun, sections=self.begun.sections | own)

    def save(self) -> None:
        if self.path is not None:
            write_check_report(self.path, self.as_checked())


def say(line: str) -> None:
    """Progress goes to stderr: stdout is the report's alone."""
    print(line, file=sys.stderr, flush=True)
