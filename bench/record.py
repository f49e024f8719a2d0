"""report.json: what each section found when it last ran. Knows nothing of what is measured.

    {"sections": {NAME: {"started_at", "commit", "machine", "load", "seconds",
                         "rows", "not_run", "error"}}}

A run replaces the sections that it ran and keeps the others, so that each has its own date,
commit and machine. A file of bench/results is the same, with the sections of one day, machine and
commit only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.machine import Machine
from bench.report import NotRun, Row


@dataclass(frozen=True, slots=True)
class SectionRecord:
    """One run of one section.

    started_at: UTC, ISO 8601. load: of the machine over the minute before, in running processes.
    error: of a section that didn't come to its end; it has no rows then.
    """

    started_at: str
    commit: str | None
    machine: Machine
    load: float
    seconds: float
    rows: list[Row] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    sections: dict[str, SectionRecord] = field(default_factory=dict)

    def ordered(self, names: Sequence[str]) -> dict[str, SectionRecord]:
        """The sections in the order of `names`; behind them those that have gone since."""
        ranks = {name: index for index, name in enumerate(names)}
        return dict(sorted(self.sections.items(), key=lambda item: ranks.get(item[0], len(ranks))))


class UnreadableRecord(Exception):
    """report.json is there and is not what this version writes."""


def read_record(path: Path) -> Record:
    """An empty one if there is no file. Raises: UnreadableRecord."""
    if not path.exists():
        return Record()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UnreadableRecord(f"{path}: {exc}") from exc


def add_section(path: Path, name: str, section: SectionRecord) -> Record:
    """Puts it into the file and returns all of it. A file that can't be read is replaced; the
    caller warns of that before."""
    try:
        sections = dict(read_record(path).sections)
    except UnreadableRecord:
        sections = {}
    sections[name] = section
    record = Record(sections)
    replace_text(path, msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")
    return record


def result_path(directory: Path, section: SectionRecord) -> Path:
    """Where a run is kept: by its date, by the card or else the CPU, and by its commit."""
    machine = section.machine
    where = machine.card or f"{machine.cpu} {machine.cores} cores"
    name = re.sub(r"[^a-z0-9]+", "-", where.lower()).strip("-")
    commit = (section.commit or "unknown").replace("+", "-changed")
    return directory / f"{section.started_at[:10]}-{name}-{commit}.json"


def replace_text(path: Path, text: str) -> None:
    """Atomic: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(text)
    written.replace(path)
