"""python -m bench [section ...]: runs the named sections, by default all, and writes the report.

    --record            keeps the run in bench/results as well
    --gpu-report FILE   what the GPU check wrote elsewhere stands for running the GPU sections
    --beside FILE       the page shows what that record of bench/results has beside

`python -m bench page` writes the page again and runs nothing; `python -m bench serve [flag ...]`
sends a load to a running server instead. A section is a module of this package with
`run() -> Sequence[Row | NotRun]`. Adding one is one line below.
"""

from __future__ import annotations

import argparse
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
    result_path,
)
from bench.report import NotRun, Row, print_table
from demo.servers import end_when_terminated

SECTIONS = {
    "transfer": "bench.transfers",
    "streams": "bench.streams",
    "planner": "bench.planner",
    "scheduler": "bench.scheduler",
    "engine": "bench.engine",
    "cpu_attention": "bench.cpu_attention",
    "speculation": "bench.speculation",
    "pair": "bench.pair",
    "prefix_tree": "bench.prefix_tree",
    "prefix_reuse": "bench.prefix_reuse",
    "samples": "bench.samples",
    "returns": "bench.returns",
    "host_tier": "bench.host_tier",
    "staging": "bench.staging",
    "cache_kinds": "bench.cache_kinds",
    "states": "bench.states",
    "latent_reads": "bench.latent_reads",
    "verify": "bench.verify",
    "frontend": "bench.frontend",
    "large_bodies": "bench.large_bodies",
    "tails": "bench.tails",
    "goodput": "bench.goodput",
    "gpu": "bench.gpu",
    "gpu_peers": "bench.gpu_peers",  # of what gpu found
}
JSON_PATH = Path(__file__).parent / "out" / "report.json"
RESULTS = Path(__file__).parent / "results"
PAGE = "page"
PAGE_NAME = "report.html"  # beside it


def main(arguments: list[str]) -> int:
    """0 if every section came to its end, whether its targets were met or not."""
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    args = parse(arguments)
    end_when_terminated()
    unknown = [name for name in args.sections if name not in (*SECTIONS, PAGE)]
    if unknown:
        print(f"unknown section {', '.join(unknown)}: must be one of {', '.join(SECTIONS)}, {PAGE}")
        return 2
    try:
        beside = read_record(args.beside) if args.beside else None
        given = read_given(args.gpu_report or [])
    except UnreadableRecord as exc:
        print(f"can't be read: {exc}")
        return 2
    try:
        record = read_record(JSON_PATH)
    except UnreadableRecord as exc:
        print(f"{exc}: can't be read and will be replaced; sections of earlier runs are lost")
        record = Record()
    named = args.sections or ([] if given else list(SECTIONS))
    failed: list[str] = []
    for name in [*given, *(name for name in named if name != PAGE and name not in given)]:
        section = given[name] if name in given else run_section(name)
        # At once: what was measured is kept even if a later section ends the process.
        record = add_section(JSON_PATH, name, section)
        if args.record:
            path = result_path(RESULTS, section)
            add_section(path, name, section)
            print(f"kept in {path}")
        if section.error:
            failed.append(name)
    print(f"written to {JSON_PATH}")
    write_page(record, args.beside.stem if args.beside else "", beside)
    if failed:
        print(f"did not come to their end: {', '.join(failed)}")
    return 1 if failed else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; or {PAGE}")
    parser.add_argument("--record", action="store_true", help=f"keep the run in {RESULTS.name}/")
    parser.add_argument(
        "--gpu-report", type=Path, action="append", help="of tests/gpu/check.py; may be repeated"
    )
    parser.add_argument("--beside", type=existing, help="a record that the page shows beside")
    return parser.parse_args(arguments)


def existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: must be a file")
    return path


def read_given(paths: Sequence[Path]) -> dict[str, SectionRecord]:
    """Sections that were measured elsewhere. Raises: UnreadableRecord."""
    if not paths:
        return {}
    from bench.gpu_records import read_sections  # only now: it loads torch

    return read_sections(paths)


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


def write_page(record: Record, beside_name: str = "", beside: Record | None = None) -> None:
    try:
        page = importlib.import_module("bench.page")
    except ModuleNotFoundError as exc:
        print(f"no page: {exc.name} is not installed; it needs: pip install 'baton[bench]'")
        return
    path = JSON_PATH.with_name(PAGE_NAME)
    replace_text(path, page.render(record, list(SECTIONS), beside_name, beside))
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
