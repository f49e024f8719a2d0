"""What a GPU has to reach: figures of the GPU check, held against their targets.

Knows nothing of how they are measured: `tests/gpu/check.py` does that, in processes of its own.
Where there is no card, or where a part of the check failed, that is reported.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu_report import CheckReport, read_check_report
from bench.report import NotRun, Row, Target, at_least, at_most

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "tests" / "gpu" / "check.py"
OUT_PATH = Path(__file__).parent / "out" / "gpu.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A figure of the check, and what it has to reach on an H200.

    section, figure: as the check names them. target: None: the number is reported without a target.
    less: a figure that is taken off, so that the row is what is added to it.
    """

    name: str
    unit: str
    target: Target | None
    section: str
    figure: str
    less: str = ""


def first_tokens() -> list[Wanted]:
    """Of a pair, and what it adds to a single server of the same run."""
    found: list[Wanted] = []
    for length, bound_ms, added_ms in ((128, 16, 3), (2048, 55, 3), (8192, 225, 5)):
        pair, single = (f"{name}: TTFT p50, {length} tokens, ms" for name in ("pair", "single"))
        found += [
            Wanted(f"gpu_ttft_{length}", "ms", at_most(bound_ms), "pair", pair),
            Wanted(f"gpu_ttft_{length}_added", "ms", at_most(added_ms), "pair", pair, single),
        ]
    return found


# (case, server, figure) of a load -> what it has to reach.
LOAD_TARGETS = {
    ("512/256 x 32", "pair", "ITL p50, ms"): at_most(5.7),
    ("512/256 x 128", "pair", "ITL p50, ms"): at_most(8.8),
    ("512/256 x 128", "pair", "output tokens/s"): at_least(7100),
    ("512/256 x 128", "single", "output tokens/s"): at_least(8700),
    ("4096/256 x 32", "pair", "output tokens/s"): at_least(1190),
    ("4096/256 x 32", "pair", "ITL p99, ms"): at_most(15),
}
LOAD_FIGURES = {
    "output tokens/s": ("rate", "tokens/s"),
    "ITL p50, ms": ("itl_p50", "ms"),
    "ITL p99, ms": ("itl_p99", "ms"),
    "TTFT p50, ms": ("ttft_p50", "ms"),
}


def loads() -> list[Wanted]:
    found: list[Wanted] = []
    for case in ("512/256 x 32", "512/256 x 128", "4096/256 x 32"):
        for kind in ("single", "pair"):
            for figure, (short, unit) in LOAD_FIGURES.items():
                name = f"gpu_{name_of(case)}_{kind}_{short}"
                target = LOAD_TARGETS.get((case, kind, figure))
                found.append(
                    Wanted(name, unit, target, f"load_{kind}", f"{kind}: {case}: {figure}")
                )
    return found


def name_of(case: str) -> str:
    return case.replace("/", "_").replace(" ", "")


def sizes() -> list[Wanted]:
    return [
        Wanted(f"gpu_transfer_{mib}MiB_{way}", "GB/s", None, "sizes", f"{mib} MiB {way}: GB/s")
        for mib in (256, 1024, 4096)
        for way in ("direct", "staged")
    ]


WANTED = (
    Wanted("gpu_transfer_1GiB", "GB/s", at_least(400), "transfer", "2048 KiB pages: GB/s"),
    *sizes(),
    *first_tokens(),
    Wanted("gpu_itl_1_stream", "ms", at_most(4.7), "pair", "pair: ITL p50, 1 stream, ms"),
    *loads(),
    Wanted(
        *("gpu_decode_attention", "of copy", at_least(0.8)),
        *("engine", "decode attention, of copy"),
    ),
    Wanted("gpu_prefill", "of matmul", at_least(0.55), "engine", "prefill 8192: of matmul"),
)


def run() -> list[Row | NotRun]:
    """Leaves the check's report at OUT_PATH, also after a failure."""
    if not torch.cuda.is_available():
        return nothing_run("torch sees no CUDA device")
    if not CHECK.exists():
        return nothing_run(f"{CHECK} is not there: the GPU check comes with the repository only")
    OUT_PATH.unlink(missing_ok=True)
    # Takes many minutes; its progress goes to stderr.
    command = [sys.executable, str(CHECK), "--out", str(OUT_PATH)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return results_of(read_check_report(OUT_PATH))


def nothing_run(reason: str) -> list[Row | NotRun]:
    return [not_run(one, reason) for one in WANTED]


def results_of(report: CheckReport, wanted: Sequence[Wanted] = WANTED) -> list[Row | NotRun]:
    """Rows of what was measured. Figures of a section in which a check failed are of something that
    doesn't work, and stay in the report."""
    results: list[Row | NotRun] = []
    for one in wanted:
        if reason := why_missing(report, one):
            results.append(not_run(one, reason))
            continue
        figures = report.sections[one.section].figures
        value, less = figures[one.figure], figures[one.less] if one.less else 0
        assert not isinstance(value, str) and not isinstance(less, str), one
        results.append(Row(one.name, value - less, one.unit, target=one.target))
    return results


def why_missing(report: CheckReport, wanted: Wanted) -> str:
    """Why there is no row of it; empty if there is."""
    section = report.sections.get(wanted.section)
    if section is None:
        return f"section {wanted.section}: was not asked for"
    if section.failed:
        return f"section {wanted.section}: {section.failed[0]}"
    missing = [name for name in (wanted.figure, wanted.less) if name not in section.figures]
    if any(missing):
        skipped = section.skipped.get(wanted.figure.rpartition(":")[0], "has no such figure")
        return f"section {wanted.section}: {skipped if section.has_ended else 'ended before it'}"
    return ""


def not_run(wanted: Wanted, reason: str) -> NotRun:
    return NotRun(wanted.name, reason, f"{wanted.target} {wanted.unit}" if wanted.target else "")
