"""What a benchmark reports: rows of a value beside its reference, as a table and as JSON.

Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPORT_PATH = Path(__file__).parent / "out" / "report.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. `reference` names what it is held against, if anything.

    value, reference_value: medians of the samples, both in `unit`.
    ratio: value over reference_value; read with the unit whether more is better.
    samples: how many times each was measured.
    """

    name: str
    value: float
    unit: str
    reference: str | None
    reference_value: float | None
    ratio: float | None
    samples: int


def row_of_medians(
    name: str,
    unit: str,
    values: Sequence[float],
    reference: str | None = None,
    reference_values: Sequence[float] = (),
) -> Row:
    """A row from samples taken alternately, so that a slow minute of the machine hits both."""
    value = statistics.median(values)
    if reference is None or not reference_values:
        return Row(name, value, unit, None, None, None, len(values))
    against = statistics.median(reference_values)
    return Row(name, value, unit, reference, against, value / against, len(values))


def print_table(rows: Sequence[Row]) -> None:
    columns = [("name", "value", "unit", "reference", "ref. value", "ratio", "samples")]
    for row in rows:
        against = "" if row.reference_value is None else f"{row.reference_value:.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        reference = row.reference or ""
        columns.append(
            (row.name, f"{row.value:.3g}", row.unit, reference, against, ratio, str(row.samples))
        )
    widths = [max(len(line[index]) for line in columns) for index in range(len(columns[0]))]
    for line in columns:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def write_report(rows: Sequence[Row], path: Path = REPORT_PATH) -> None:
    content = [asdict(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
