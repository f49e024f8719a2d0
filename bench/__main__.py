"""python -m bench [section ...]: runs the named sections, by default all, and writes the report.

`python -m bench serve [flag ...]` sends a load to a running server instead. A section is a module
of this package with `run() -> list[Row]`. Adding one is one line below.
"""

from __future__ import annotations

import importlib
import sys
import time

from bench.report import REPORT_PATH, Row, print_table, write_report

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
}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    unknown = [name for name in arguments if name not in SECTIONS]
    if unknown:
        print(f"unknown section {', '.join(unknown)}: must be one of {', '.join(SECTIONS)}")
        return 2
    rows: list[Row] = []
    for name in arguments or SECTIONS:
        print(f"== {name}", flush=True)
        started_at = time.perf_counter()
        section_rows: list[Row] = importlib.import_module(SECTIONS[name]).run()
        print_table(section_rows)
        print(f"== {name}: {time.perf_counter() - started_at:.0f} s", flush=True)
        rows += section_rows
    write_report(rows)
    print(f"written to {REPORT_PATH}")
    return 0


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
