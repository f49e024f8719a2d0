"""Traces that are tables of comma-separated values, found by the names of their columns.

    lengths    timestamp (ms), input_length, output_length
    azure      TIMESTAMP (date and time), ContextTokens, GeneratedTokens: Azure's of 2023 and 2024
    burstgpt   Timestamp (s), Request tokens, Response tokens, and in later releases Session ID and
               Elapsed time (s)

Other columns are passed over.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from bench.serve.traces.row import BLOCK_TOKENS, Trace, TraceRow, checked
from common.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """The columns of one format, by their names in line 1.

    to_ms: reads the column of times. session, elapsed: "" or columns that a table need not have.
    """

    name: str
    timestamp: str
    to_ms: Callable[[str], float]
    input_length: str
    output_length: str
    session: str = ""
    elapsed: str = ""

    @property
    def needed(self) -> tuple[str, str, str]:
        return (self.timestamp, self.input_length, self.output_length)


def _of_seconds(text: str) -> float:
    return 1e3 * float(text)


def _of_date(text: str) -> float:
    """A date without a zone is UTC's: only differences count."""
    parsed = datetime.fromisoformat(text)
    return 1e3 * (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


TABLES = (
    Table("lengths", "timestamp", float, "input_length", "output_length"),
    Table("azure", "TIMESTAMP", _of_date, "ContextTokens", "GeneratedTokens"),
    Table(
        "burstgpt", "Timestamp", _of_seconds, "Request tokens", "Response tokens",
        session="Session ID", elapsed="Elapsed time",
    ),
)  # fmt: skip


def find_table(text: str) -> Table | None:
    """The format whose columns line 1 names."""
    columns = next(csv.reader(text.splitlines()[:1]), [])
    return next((table for table in TABLES if set(table.needed) <= set(columns)), None)


def read_table(where: str, text: str, table: Table) -> Trace:
    """Raises: ConfigError with the line."""
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in table.needed if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{where}: line 1 must name the columns {', '.join(table.needed)} of the format "
            f"{table.name}; {', '.join(missing)} is missing"
        )
    return Trace(list(_rows(where, reader, table)), BLOCK_TOKENS)


def _rows(where: str, reader: csv.DictReader[str], table: Table) -> Iterator[TraceRow]:
    for record in reader:
        at = f"{where}: line {reader.line_num}"
        yield checked(
            at,
            TraceRow(
                timestamp=_read(at, record, table.timestamp, table.to_ms),
                input_length=_read(at, record, table.input_length, int),
                output_length=_read(at, record, table.output_length, int),
                session=record.get(table.session) or "",
                elapsed_s=_read(at, record, table.elapsed, float)
                if record.get(table.elapsed)
                else 0.0,
            ),
        )


def _read(
    where: str, record: Mapping[str, str | None], column: str, parse: Callable[[str], T]
) -> T:
    value = record[column]
    try:
        return parse(value or "")
    except ValueError as exc:
        what = {int: "a whole number", _of_date: "a date and time"}.get(parse, "a number")
        raise ConfigError(f"{where}: {column} {value!r}: must be {what}") from exc
