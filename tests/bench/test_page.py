"""The page shows everything that was found, escaped, and needs nothing but itself."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.charts import VARIABLES, bound_of, draw, sizes_of
from bench.machine import Machine
from bench.page import render
from bench.record import Record, SectionRecord, read_record
from bench.report import NotRun, Row, Target, at_least, at_most

HERE = Machine("a CPU", 2, 8.0, "3.11", "2.13", "1.22")
THERE = Machine("another CPU", 64, 512.0, "3.12", "2.13", "1.22")
HOSTILE = '<script>alert("&")</script>$x_1$'
MET = Row("fast", 2.0, "GB/s", "memcpy", 2.0, 1.0, 9, at_least(0.9))
MISSED = Row("slow", 3.25, "ms", target=at_most(3))


def section_of(
    *rows: Row, not_run: tuple[NotRun, ...] = (), error: str = "", machine: Machine = HERE
) -> SectionRecord:
    return SectionRecord(
        "2026-01-01T00:00:00+00:00", "abc", machine, 0.5, 1.0, list(rows), list(not_run), error
    )


class Text(HTMLParser):
    """The text of a page, and the elements and attributes it is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(page)
        self.text = re.sub(r"\s+", " ", "".join(self.parts))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("href", "src", "xlink:href", "srcset", "action"):
                self.links.append(value or "")


def curve(kib: int, reference: str, target: Target | None = None) -> Row:
    return Row(f"transfer_shm_{kib}KiB", 3.0, "GB/s", reference, 2.0, 1.5, 9, target)


def test_the_page_begins_with_what_was_met_missed_and_not_run() -> None:
    record = Record(
        {
            "two": section_of(MISSED, not_run=(NotRun("gone", "no such card", "at least 5"),)),
            "one": section_of(MET, Row("told", 5.0, "MiB")),
            "three": section_of(error="RuntimeError: it burnt"),
        }
    )
    told = Text(render(record, ["one", "two", "three", "four"])).text
    assert "1 targets met" in told and "1 missed" in told and "1 rows not run" in told
    assert "slow: 3.25 ms; target at most 3" in told
    assert "two: no such card: gone" in told
    assert "three, the section: it broke: RuntimeError: it burnt" in told
    assert "four, the section: never asked for; python -m bench four" in told
    assert told.index("a CPU, 2 cores") < told.index("1 targets met")
    rows = told[told.index(" one 2026") :]
    assert rows.index("fast") < rows.index(" two 2026") < rows.index(" three 2026")
    assert "gone: not run: no such card; target at least 5" in rows


def test_figures_of_two_machines_are_told_apart() -> None:
    record = Record({"one": section_of(MET), "two": section_of(MET, machine=THERE)})
    told = Text(render(record, ["one", "two"])).text
    assert told.count("another CPU, 64 cores") == 2  # at the top, and where it was measured


def test_whatever_is_given_is_escaped() -> None:
    hostile = Row(HOSTILE, 1.0, HOSTILE, HOSTILE, 2.0, 0.5, 1, at_least(1))
    curves = curve(4, HOSTILE), curve(16, HOSTILE)
    record = Record(
        {
            "dots": section_of(hostile, not_run=(NotRun(HOSTILE, HOSTILE, HOSTILE),)),
            "curves": section_of(*curves),
            HOSTILE: section_of(hostile, error=HOSTILE),
        }
    )
    page = Text(render(record, ["dots", HOSTILE + "2"]))
    assert page.tags["script"] == 0 and "alert" in page.text


def test_a_page_needs_nothing_but_itself_and_its_parts_have_names_of_their_own() -> None:
    curves = [curve(kib, name) for kib in (4, 16) for name in ("memcpy", "NIXL")]
    record = Record({name: section_of(MET, MISSED) for name in ("one", "two")})
    record.sections["three"] = section_of(*curves)
    source = render(record, ["one", "two", "three"])
    page = Text(source)
    assert page.tags["svg"] == 3 and page.tags["table"] == 3
    assert not page.tags.keys() & {"script", "link", "img", "iframe"}
    assert all(link.startswith("#") for link in page.links), page.links
    assert not re.search(r"url\((?!#)|@import", source)
    in_place = {link.removeprefix("#") for link in page.links}
    assert in_place <= page.ids.keys()
    clips = [name for name, count in page.ids.items() if count > 1 and f"url(#{name})" in source]
    assert not clips, "two pictures call their parts alike"


def test_a_picture_has_the_colours_of_its_page() -> None:
    css = (Path(bench.__file__).parent / "page.css").read_text()
    svg = draw([MET, MISSED], "one") + draw([curve(4, "a"), curve(16, "b")], "two")
    used = set(re.findall(r"var\((--[\w-]+)\)", svg))
    assert {"--ink", "--muted", "--accent", "--bad", "--curve-0", "--curve-1"} <= used
    for variable in VARIABLES.values():
        assert css.count(f"{variable}:") == 2, f"{variable}: once for light, once for dark"
    fixed = {color.lower() for color in re.findall(r"#[0-9a-fA-F]{6}\b", svg)}
    assert not fixed, fixed


def test_rows_by_size_become_curves_and_others_dots() -> None:
    rows = [curve(4, "memcpy"), curve(16, "memcpy")]
    nixl = Row("transfer_shm_4KiB_over_nixl", 3.0, "GB/s", "NIXL", 1.0, 3.0)
    assert sizes_of([*rows, nixl]) == {
        "transfer_shm": {"memcpy": {4: rows[0], 16: rows[1]}, "NIXL": {4: nixl}}
    }
    assert sizes_of([*rows, MISSED]) == {}
    assert draw([], "none") == ""


@pytest.mark.parametrize("values", [(0.0,), (-9.8, 0.2), (1e-3, 1e6), (0.0, 0.0), (5.0, 5.0)])
def test_any_numbers_can_be_drawn(values: tuple[float, ...]) -> None:
    svg = draw([Row(f"row {value}", value, "ms", target=at_most(1)) for value in values], "one")
    assert all(f"row {value}" in svg for value in values)


def test_the_target_is_drawn_on_the_axis_of_the_value() -> None:
    assert bound_of(Row("a", 3.0, "GB/s", "memcpy", 4.0, 0.75, 1, at_least(0.5))) == 2.0
    assert bound_of(MISSED) == 3.0
    assert bound_of(Row("a", 3.0, "GB/s")) is None


def test_a_record_is_shown_beside_with_its_date_and_machine() -> None:
    later = Row("slow", 2.25, "ms", target=at_most(3))
    record = Record({"one": section_of(later, MET), "two": section_of(MET)})
    beside = Record({"one": section_of(MISSED, machine=THERE), "gone": section_of(MET)})
    page = Text(render(record, ["one", "two"], "2026-01-01-here", beside))
    assert "Beside each: 2026-01-01-here" in page.text
    row = page.text[page.text.index("slow 2.25 ms") :]
    assert row.startswith("slow 2.25 ms 3.25 ms ✓ met")
    assert page.text.count("another CPU, 64 cores") == 1
    assert page.text.count("measured beside reference") == 1, "of the section that it has"
    assert "measured beside" not in Text(render(record, ["one", "two"])).text


def test_a_run_writes_the_page_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "JSON_PATH", tmp_path / "report.json")
    monkeypatch.setitem(bench.SECTIONS, "broken", "bench.no_such_module")
    assert bench.main(["broken"]) == 1
    assert list(read_record(tmp_path / "report.json").sections) == ["broken"]
    assert "no_such_module" in (tmp_path / "report.html").read_text()
