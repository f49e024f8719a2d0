"""What the GPU check found: checks that held or did not, figures, and what was not looked at.

Knows nothing of what is checked.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Figure = float | int | str


@dataclass(slots=True)
class Section:
    """One part of the report. checks: name -> "ok", or what is wrong."""

    name: str
    checks: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, name: str, is_so: bool, otherwise: str = "is not so") -> None:
        self.checks[name] = "ok" if is_so else otherwise
        say(f"  {'ok    ' if is_so else 'FAILED'} {name}{'' if is_so else f': {otherwise}'}")

    def figure(self, name: str, value: Figure) -> None:
        self.figures[name] = round(value, 6) if isinstance(value, float) else value
        say(f"         {name} = {self.figures[name]}")

    def skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        say(f"  SKIPPED {name}: {reason}")

    @property
    def has_failed(self) -> bool:
        return any(outcome != "ok" for outcome in self.checks.values())

    def as_dict(self) -> dict[str, object]:
        return {
            "checks": self.checks,
            "figures": self.figures,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 1),
        }


@dataclass(slots=True)
class Report:
    """All sections, in the order they ran."""

    sections: list[Section] = field(default_factory=list)

    @contextmanager
    def section(self, name: str) -> Iterator[Section]:
        """An error inside is a check of the section that failed; the others still run."""
        section = Section(name)
        self.sections.append(section)
        say(f"{name}:")
        started_at = time.monotonic()
        try:
            yield section
        except Exception as error:  # noqa: BLE001 - whatever broke is the finding
            traceback.print_exc()
            section.check("runs to its end", False, f"{type(error).__name__}: {error}"[:500])
        section.seconds = time.monotonic() - started_at

    @property
    def has_failed(self) -> bool:
        return any(section.has_failed for section in self.sections)

    def as_dict(self) -> dict[str, object]:
        return {
            "result": "failed" if self.has_failed else "ok",
            "sections": {section.name: section.as_dict() for section in self.sections},
        }


def say(line: str) -> None:
    """Progress goes to stderr: stdout is the report's alone."""
    print(line, file=sys.stderr, flush=True)
