"""What a GPU has to reach: figures of the GPU check, held against their targets.

Knows nothing of how they are measured: `tests/gpu/check.py` does that, in a process of its own.
Where there is no card, or where the check doesn't measure something yet, that is reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.report import NotRun, Row, Target, at_least, at_most

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "tests" / "gpu" / "check.py"
OUT_PATH = Path(__file__).parent / "out" / "gpu.json"

Figures = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A figure of the check, and what it has to reach on an H200.

    section, figure: as the check names them; without a figure it doesn't measure this.
    less: a figure that is taken off, so that the row is what is added to it.
    """

    name: str
    unit: str
    target: Target
    section: str = ""
    figure: str = ""
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


WANTED = (
    Wanted("gpu_handover_1GiB", "GB/s", at_least(400), "handover", "2048 KiB pages: GB/s"),
    *first_tokens(),
    Wanted("gpu_itl_1_stream", "ms", at_most(4.7), "pair", "pair: ITL p50, 1 stream, ms"),
    Wanted("gpu_itl_32_streams", "ms", at_most(5.7)),
    Wanted("gpu_itl_128_streams", "ms", at_most(8.8)),
    Wanted("gpu_512_256_x128_pair", "tokens/s", at_least(7100)),
    Wanted("gpu_512_256_x128_single", "tokens/s", at_least(8700)),
    Wanted("gpu_4096_256_x32_pair", "tokens/s", at_least(1190)),
    Wanted("gpu_4096_256_x32_itl_p99", "ms", at_most(15)),
    Wanted("gpu_decode_attention", "of copy", at_least(0.8)),
    Wanted("gpu_prefill", "of peak", at_least(0.55)),
)


def run() -> list[Row | NotRun]:
    if not torch.cuda.is_available():
        return nothing_run("torch sees no CUDA device")
    if not CHECK.exists():
        return nothing_run(f"{CHECK} is not there: the GPU check comes with the repository only")
    return results_of(run_check())


def nothing_run(reason: str) -> list[Row | NotRun]:
    return [NotRun(one.name, reason, f"{one.target} {one.unit}") for one in WANTED]


def run_check() -> Figures:
    """Takes minutes; its progress goes to stderr. Raises: RuntimeError if a check failed, for then
    its figures are of something that doesn't work."""
    OUT_PATH.parent.mkdir(parents=True, exist_ok=True)
    OUT_PATH.unlink(missing_ok=True)
    command = [sys.executable, str(CHECK), "--out", str(OUT_PATH)]
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise RuntimeError(f"{CHECK.name} ended with code {code}; its report: {OUT_PATH}")
    sections = json.loads(OUT_PATH.read_text())["sections"]
    return {name: section["figures"] for name, section in sections.items()}


def results_of(figures: Figures, wanted: Sequence[Wanted] = WANTED) -> list[Row | NotRun]:
    """figures: {section: {figure: number}}."""
    results: list[Row | NotRun] = []
    for one in wanted:
        found = figures.get(one.section, {})
        value, less = found.get(one.figure), found.get(one.less, 0.0)
        if isinstance(value, float | int) and isinstance(less, float | int):
            results.append(Row(one.name, value - less, one.unit, target=one.target))
        else:
            reason = f"{CHECK.name} has no such figure yet"
            results.append(NotRun(one.name, reason, f"{one.target} {one.unit}"))
    return results
