"""Traces of a service: when requests came and how long they were. Knows nothing of tokens.

A .jsonl has the form of Mooncake's, one object per line: `timestamp` (ms), `input_length`,
`output_length`, `hash_ids` (one id for every block of the prompt; equal ids are equal tokens).
A .csv has the first three as columns, named in its first line; others are passed over.
"""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from common.errors import ConfigError

LENGTH_MAX = 1 << 24
COLUMNS = ("timestamp", "input_length", "output_length")


class TraceRow(msgspec.Struct, frozen=True):
    """timestamp: ms. hash_ids: empty if nothing is shared."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceRow]:
    """Rows in the order of their timestamps. Raises: ConfigError naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--dataset-path {path}: can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--dataset-path {path}: must be text") from exc
    if path.suffix == ".csv":
        rows = _read_csv(path, text)
    elif path.suffix == ".jsonl":
        rows = _read_jsonl(path, text)
    else:
        raise ConfigError(f"--dataset-path {path}: must end with .jsonl or .csv")
    if not rows:
        raise ConfigError(f"--dataset-path {path}: must hold at least one request")
    return sorted(rows, key=lambda row: row.timestamp)


def _read_jsonl(path: Path, text: str) -> list[TraceRow]:
    rows: list[TraceRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=TraceRow)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise ConfigError(f"--dataset-path {path}: line {number}: {exc}") from exc
        rows.append(_checked(path, number, row))
    return rows


def _read_csv(path: Path, text: str) -> list[TraceRow]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"--dataset-path {path}: line 1 must name the columns {', '.join(COLUMNS)}; "
            f"{', '.join(missing)} is missing"
        )
    rows: list[TraceRow] = []
    for record in reader:
        number = reader.line_num
        try:
            found = {name: record[name] for name in COLUMNS}
            row = msgspec.convert(found, TraceRow, strict=False)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"--dataset-path {path}: line {number}: {exc}") from exc
        rows.append(_checked(path, number, row))
    return rows


def _checked(path: Path, number: int, row: TraceRow) -> TraceRow:
    is_usable = (
        0 <= row.timestamp < 1e15
        and 1 <= row.input_length <= LENGTH_MAX
        and 1 <= row.output_length <= LENGTH_MAX
        and all(hash_id >= 0 for hash_id in row.hash_ids)
    )
    if not is_usable:
        raise ConfigError(
            f"--dataset-path {path}: line {number}: timestamp must be in 0..1e15 ms, lengths in "
            f"1..{LENGTH_MAX}, hash_ids not negative"
        )
    return row
