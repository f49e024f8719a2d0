"""report.html: the record as one page that needs nothing else, not even a network.

Knows nothing of the measurements. The template escapes all values except the pictures, which are
made here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bench.charts import draw
from bench.record import Record, SectionRecord
from bench.report import Row, short

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Summary:
    """What the page begins with. missed: (section name, row).

    not_run: (section name, reason) -> the rows' names, one line for all that lack the same thing.
    not_run_count: of rows; without those of sections that broke or never ran.
    never: sections of which there is no record. failed: section name -> what ended it.
    """

    met_count: int
    missed: list[tuple[str, Row]]
    not_run: dict[tuple[str, str], list[str]]
    not_run_count: int
    never: list[str]
    failed: dict[str, str]
    machines: list[str]


def summarize(sections: Mapping[str, SectionRecord], names: Sequence[str]) -> Summary:
    rows = [(name, row) for name, section in sections.items() for row in section.rows]
    not_run: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, section in sections.items():
        for one in section.not_run:
            not_run[name, one.reason].append(one.name)
    return Summary(
        met_count=sum(row.is_met is True for _, row in rows),
        missed=[(name, row) for name, row in rows if row.is_met is False],
        not_run=not_run,
        not_run_count=sum(map(len, not_run.values())),
        never=[name for name in names if name not in sections],
        failed={name: section.error for name, section in sections.items() if section.error},
        machines=list(dict.fromkeys(str(section.machine) for section in sections.values())),
    )


def values_of(record: Record) -> dict[tuple[str, str], Row]:
    """(section name, row name) -> row."""
    return {
        (name, row.name): row for name, section in record.sections.items() for row in section.rows
    }


def render(
    record: Record, names: Sequence[str], beside_name: str = "", beside: Record | None = None
) -> str:
    """names: of all sections there are, in their order. beside: a record whose rows of the same
    name are shown beside, and what it is called."""
    sections = record.ordered(names)
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    return environment.get_template("page.html.j2").render(
        summary=summarize(sections, names),
        sections=sections,
        pictures={name: Markup(draw(one.rows, name)) for name, one in sections.items()},
        beside_name=beside_name,
        beside=values_of(beside) if beside is not None else {},
        beside_of=beside.sections if beside is not None else {},
        css=Markup((HERE / "page.css").read_text()),
    )
