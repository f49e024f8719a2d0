"""The report of a benchmark: rows of a value beside its reference and its target, and a table.

Knows nothing of the measurements, nor of the place of reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a row: of its ratio if it has a reference, else of its value."""

    sense: Literal["at least", "at most"]
    bound: float

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"

    @property
    def sign(self) -> str:
        return "≥" if self.sense == "at least" else "≤"

    def is_met_by(self, number: float) -> bool:
        return number >= self.bound if self.sense == "at least" else number <= self.bound


def at_least(bound: float) -> Target:
    return Target("at least", bound)


def at_most(bound: float) -> Target:
    return Target("at most", bound)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. `reference` names what it is held against, if anything.

    value, reference_value: medians of the samples, both in `unit`.
    ratio: value over reference_value; read with the unit whether more is better.
    samples: how many times each was measured.
    target: None: the number is reported without a target.
    """

    name: str
    value: float
    unit: str
    reference: str | None = None
    reference_value: float | None = None
    ratio: float | None = None
    samples: int = 1
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        return self.target.is_met_by(self.value if self.ratio is None else self.ratio)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A row that a section could not measure, because this machine lacks a part.

    name: of the row, or of all rows of its kind. target: in words, as it may be of several rows.
    """

    name: str
    reason: str
    target: str = ""


def row_of_medians(
    name: str,
    unit: str,
    values: Sequence[float],
    reference: str | None = None,
    reference_values: Sequence[float] = (),
    target: Target | None = None,
) -> Row:
    """A row from samples taken alternately, so that a slow minute of the machine hits both."""
    value = statistics.median(values)
    if reference is None or not reference_values:
        return Row(name, value, unit, samples=len(values), target=target)
    against = statistics.median(reference_values)
    return Row(name, value, unit, reference, against, value / against, len(values), target)


HEADINGS = ("name", "value", "unit", "reference", "ref. value", "ratio", "samples", "target", "met")


def cells_of(row: Row) -> tuple[str, ...]:
    """The row as text, one cell for each of `HEADINGS`."""
    return (
        row.name,
        short(row.value),
        row.unit,
        row.reference or "",
        "" if row.reference_value is None else short(row.reference_value),
        "" if row.ratio is None else f"{row.ratio:.3f}",
        str(row.samples),
        "" if row.target is None else str(row.target),
        {None: "", True: "met", False: "MISSED"}[row.is_met],
    )


def short(number: float) -> str:
    """Three digits, or as many as stand before the point."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def print_table(results: Sequence[Row | NotRun]) -> None:
    """The rows, then what was not run and why."""
    rows = [cells_of(result) for result in results if isinstance(result, Row)]
    if rows:
        lines = [HEADINGS, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())
    for result in results:
        if isinstance(result, NotRun):
            target = f" (target: {result.target})" if result.target else ""
            print(f"{result.name}: not run: {result.reason}{target}")
