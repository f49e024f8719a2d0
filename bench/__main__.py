"""python -m bench [section ...]: runs the named sections, by default all, and writes the report.

`python -m bench serve [flag ...]` sends a load to a running server instead. A section is a module
of this package with `run() -> Sequence[Row | NotRun]`. Adding one is one line below.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.machine import describe_commit, describe_machine
from bench.record import (
    Record,
    SectionRecord,
    UnreadableRecord,
    add_section,
    read_record,
    replace_text,
)
from bench.report import NotRun, Row, print_table

SECTIONS = {
    "handover": "bench.handover",
    "planner": "bench.planner",
    "scheduler": "bench.scheduler",
    "engine": "bench.engine",
    "pair": "bench.pair",
    "staging": "bench.staging",
    "cache_kinds": "bench.cache_kinds",
    "states": "bench.states",
    "latent_reads": "bench.latent_reads",
    "verify": "bench.verify",
    "frontend": "bench.frontend",
    "tails": "bench.tails",
    "goodput": "bench.goodput",
    "gpu": "bench.gpu",
}
JSON_PATH = Path(__file__).parent / "out" / "report.json"
PAGE_NAME = "report.html"  # beside it


def main(arguments: list[str]) -> int:
    """0 if every section came to its end, whether its targets were met or not."""
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    unknown = [name for name in arguments if name not in SECTIONS]
    if unknown:
        print(f"unknown section {', '.join(unknown)}: must be one of {', '.join(SECTIONS)}")
        return 2
    try:
        read_record(JSON_PATH)
    except UnreadableRecord as exc:
        print(f"{exc}: can't be read and will be replaced; sections of earlier runs are lost")
    failed: list[str] = []
    record = Record()
    for name in arguments or SECTIONS:
        section = run_section(name)
        # At once: what was measured is kept even if a later section ends the process.
        record = add_section(JSON_PATH, name, section)
        if section.error:
            failed.append(name)
    print(f"written to {JSON_PATH}")
    write_page(record)
    if failed:
        print(f"did not come to their end: {', '.join(failed)}")
    return 1 if failed else 0


def run_section(name: str) -> SectionRecord:
    print(f"== {name}", flush=True)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    load = round(os.getloadavg()[0], 2)
    start_s = time.perf_counter()
    error = ""
    results: Sequence[Row | NotRun] = []
    try:
        results = importlib.import_module(SECTIONS[name]).run()
    except Exception as exc:  # noqa: BLE001 - the other sections can still be measured
        traceback.print_exc()
        error = f"{type(exc).__name__}: {exc}"
    seconds = time.perf_counter() - start_s
    print_table(results)
    print(f"== {name}: {seconds:.0f} s", flush=True)
    return SectionRecord(
        started_at=started_at,
        commit=describe_commit(),
        machine=describe_machine(),
        load=load,
        seconds=round(seconds, 1),
        rows=[result for result in results if isinstance(result, Row)],
        not_run=[result for result in results if isinstance(result, NotRun)],
        error=error,
    )


def write_page(record: Record) -> None:
    try:
        page = importlib.import_module("bench.page")
    except ModuleNotFoundError as exc:
        print(f"no page: {exc.name} is not installed; it needs: pip install 'baton[bench]'")
        return
    path = JSON_PATH.with_name(PAGE_NAME)
    replace_text(path, page.render(record, list(SECTIONS)))
    print(f"written to {path}")


def serve(arguments: list[str] | None = None) -> int:
    """The load tool, also installed as `baton-bench`; None: the arguments of this process."""
    try:
        cli = importlib.import_module("bench.serve.cli")
    except ModuleNotFoundError as exc:
        print(f"{exc.name} is not installed; the load tool needs: pip install 'baton[bench]'")
        return 2
    code: int = cli.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
