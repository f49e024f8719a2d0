"""Reports that the GPU check wrote on another machine, as sections of the report here.

Their date, commit and machine are those of the check, not of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.gpu import OUT_PATH, results_of
from bench.gpu_peers import rows_of
from bench.gpu_report import (
    CheckReport,
    join_check_reports,
    read_check_report,
    write_check_report,
)
from bench.record import SectionRecord
from bench.report import NotRun, Row, print_table


def read_sections(paths: Sequence[Path]) -> dict[str, SectionRecord]:
    """The sections gpu and gpu_peers. The reports are kept as if the check had run here.

    Raises: UnreadableRecord if a file is no report, or if they are not of one machine and commit.
    """
    report = join_check_reports([read_check_report(path) for path in paths])
    write_check_report(OUT_PATH, report)
    return {
        "gpu": section_of(report, results_of(report)),
        "gpu_peers": section_of(report, rows_of(report)),
    }


def section_of(report: CheckReport, results: Sequence[Row | NotRun]) -> SectionRecord:
    print_table(results)
    return SectionRecord(
        started_at=report.started_at,
        commit=report.commit,
        machine=report.machine,
        load=report.load,
        seconds=round(sum(section.seconds for section in report.sections.values()), 1),
        rows=[result for result in results if isinstance(result, Row)],
        not_run=[result for result in results if isinstance(result, NotRun)],
    )
