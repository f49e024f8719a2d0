"""A report keeps what earlier runs found, and says of every target whether it was met."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.machine import cpu_model, describe_commit, describe_machine
from bench.record import SectionRecord, UnreadableRecord, add_section, read_record
from bench.report import NotRun, Row, at_least, at_most, print_table, row_of_medians


def section_of(*rows: Row, started_at: str = "2026-01-01T00:00:00+00:00") -> SectionRecord:
    return SectionRecord(started_at, "abc", describe_machine(), 0.5, 1.0, list(rows))


def test_a_target_bounds_the_ratio_where_there_is_one_else_the_value() -> None:
    by_ratio = row_of_medians("a", "GB/s", [2.0, 3.0, 9.0], "memcpy", [4.0], at_least(0.75))
    assert (by_ratio.ratio, by_ratio.is_met) == (0.75, True)
    assert row_of_medians("a", "GB/s", [3.0], "memcpy", [4.0], at_least(0.76)).is_met is False
    assert row_of_medians("b", "ms", [3.0], target=at_most(3.0)).is_met is True
    assert row_of_medians("b", "ms", [3.1], target=at_most(3.0)).is_met is False
    assert row_of_medians("c", "ms", [3.1]).is_met is None


def test_the_table_shows_targets_and_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [
            Row("fast", 1.0, "ms", target=at_most(2)),
            Row("slow", 3.0, "ms", target=at_most(2)),
            Row("told", 3.0, "ms"),
            NotRun("absent", "no such card", "at least 5"),
        ]
    )
    fast, slow, told, absent = capsys.readouterr().out.splitlines()[1:]
    assert fast.split()[-4:] == ["at", "most", "2", "met"]
    assert slow.split()[-4:] == ["at", "most", "2", "MISSED"]
    assert told.split()[-1] == "1"
    assert absent == "absent: not run: no such card (target: at least 5)"


def test_a_run_replaces_its_own_section_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "out" / "report.json"
    before = Row("a", 1.0, "GB/s", "memcpy", 2.0, 0.5, 9, at_least(0.9))
    add_section(path, "one", section_of(before))
    add_section(path, "two", section_of(Row("b", 1.0, "ms")))
    later = "2026-02-01T00:00:00+00:00"
    add_section(path, "two", section_of(Row("b", 7.0, "ms", target=at_most(8)), started_at=later))
    record = read_record(path)
    assert record.sections["one"] == section_of(before)
    assert record.sections["two"].rows == [Row("b", 7.0, "ms", target=at_most(8))]
    assert record.sections["two"].started_at == later
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_sections_come_in_the_order_that_they_are_listed_in(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for name in ("gone", "two", "one"):
        add_section(path, name, section_of())
    assert list(read_record(path).ordered(["one", "two", "three"])) == ["one", "two", "gone"]


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "a", "value": 1.0, "unit": "ms", "samples": 1}]',
        '{"sections": {"one": {"rows"',
        '{"sections": {"one": {"rows": 3}}}',
        "",
        "\x00",
    ],
)
def test_a_file_of_another_form_is_named_and_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(UnreadableRecord, match=r"report\.json"):
        read_record(path)
    add_section(path, "one", section_of())
    assert list(read_record(path).sections) == ["one"]


def test_a_run_says_that_it_replaces_a_broken_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("[")
    monkeypatch.setattr(bench, "JSON_PATH", path)
    monkeypatch.setitem(bench.SECTIONS, "broken", "bench.no_such_module")
    assert bench.main(["broken"]) == 1
    assert "report.json" in (said := capsys.readouterr().out) and "will be replaced" in said
    assert list(read_record(path).sections) == ["broken"]


def test_a_section_that_breaks_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "JSON_PATH", tmp_path / "report.json")
    monkeypatch.setitem(bench.SECTIONS, "broken", "bench.no_such_module")
    assert bench.main(["broken", "latent_reads"]) == 1
    assert "did not come to their end: broken" in capsys.readouterr().out
    sections = read_record(tmp_path / "report.json").sections
    assert sections["broken"].error.startswith("ModuleNotFoundError")
    assert sections["latent_reads"].rows and not sections["latent_reads"].error


def test_a_record_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["page", "--beside", "no/such.json"])
    assert "no/such.json: must be a file" in capsys.readouterr().err


def test_the_page_alone_runs_nothing_and_changes_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    monkeypatch.setattr(bench, "JSON_PATH", path)
    add_section(path, "planner", section_of(Row("told", 5.0, "MiB")))
    before = path.read_bytes()
    assert bench.main(["page", "--beside", str(path)]) == 0
    assert path.read_bytes() == before
    assert "Beside each: report" in (tmp_path / "report.html").read_text()


def test_an_unknown_section_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["planer"]) == 2
    assert "unknown section planer: must be one of transfer" in capsys.readouterr().out


def test_the_machine_is_described() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert cpu_model("processor\t: 0\n") == ""
    flags = "flags\t\t: fma avx2 avx512f\n"
    assert cpu_model(f"model name\t: Some CPU\n{flags}processor\t: 1\n") == "Some CPU AVX-512"
    machine = describe_machine()
    assert machine.cores >= 1 and machine.memory_gib > 0 and machine.torch[0].isdigit()


def test_a_directory_without_a_checkout_has_no_commit(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) is None
