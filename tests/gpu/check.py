"""Builds, checks and times Baton on one GPU: `python tests/gpu/check.py`, a JSON report on stdout.

    --only attention,transfer        some of the sections, in this order
    --out FILE                       the report is there as well, from the first finding on
    --commit NAME                    what is measured, where git can't say it
    --device cpu --shape tiny        a rehearsal of this script on a machine without a GPU

Every section runs in a process of its own: one that breaks the device's context, or that a time
limit ends, costs no other its figures. Exit code 0 if every check held, 1 if one failed, 2 if there
is no device. What was not looked at is under "skipped", with the reason. README.md beside this file
says what a bare machine needs.

No machine with a GPU has run this yet: rehearsed on a CPU only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from bench.gpu_report import CheckReport
    from tests.gpu.report import Section

ROOT = Path(__file__).parents[2]
# What compiles kernels comes first, and servers last: they find everything compiled.
SECTIONS = (
    "attention",
    "kinds",
    "experts",
    "engine",
    "launch",
    "transfer",
    "sizes",
    "pair",
    "load_single",
    "load_pair",
)
TRANSFER_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
EXIT_FAILED = 1
EXIT_NO_DEVICE = 2
END_PATIENCE_S = 60.0  # of servers that drain


def main() -> int:
    args = parse_args()
    # The servers are started as modules of the current directory.
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    # A time limit ends the check by this signal, and its servers must not outlive it.
    signal.signal(signal.SIGTERM, end)
    if args.section:
        return run_section(args)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-check-") as directory:
        path = Path(args.out or f"{directory}/report.json").absolute()
        return run_sections(args, path)


def run_sections(args: argparse.Namespace, path: Path) -> int:
    """A process for each section, which add to the report one after the other."""
    from bench.gpu_report import CheckReport, read_check_report, write_check_report
    from bench.machine import describe_commit, describe_machine
    from tests.gpu.report import say

    write_check_report(
        path,
        CheckReport(
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=args.commit or describe_commit(),
            machine=describe_machine(),
            load=round(os.getloadavg()[0], 2),
            device=args.device,
            shape=args.shape,
        ),
    )
    for name in ("machine", *args.only):
        code = run_apart(args, name, path)
        if code == EXIT_NO_DEVICE:
            return code
        if name == "machine" and code:
            break  # without the native part nothing runs
        if code not in (0, EXIT_FAILED):
            report = note_end(read_check_report(path), name, code)
            write_check_report(path, report)
    report = read_check_report(path)
    print(path.read_text(), end="")
    say(f"result: {'ok' if report.is_good else 'failed'}")
    return 0 if report.is_good else EXIT_FAILED


def run_apart(args: argparse.Namespace, name: str, path: Path) -> int:
    """The exit code of a process that runs one section."""
    command = [sys.executable, str(Path(__file__)), "--section", name, "--out", str(path)]
    command += ["--device", args.device, "--shape", args.shape, "--only", ",".join(args.only)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_PATIENCE_S)


def note_end(report: CheckReport, name: str, code: int) -> CheckReport:
    """What becomes of a section whose process ended by itself: its figures stay."""
    from bench.gpu_report import CheckedSection

    found = report.sections.get(name, CheckedSection())
    checks = found.checks | {"its process": f"ended with code {code}"}
    return replace(report, sections=report.sections | {name: replace(found, checks=checks)})


def end(number: int, frame: FrameType | None) -> None:
    """So that everything on the way out of `main` is done."""
    sys.exit(128 + number)


# In a section's process ---------------------------------------------------------------------------


def run_section(args: argparse.Namespace) -> int:
    import torch

    from bench.gpu_report import read_check_report
    from tests.gpu.report import Report, say

    if args.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no CUDA device here; --device cpu --shape tiny rehearses this script")
        return EXIT_NO_DEVICE
    path = Path(args.out)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    begun = read_check_report(path)
    if device.type == "cuda" and not begun.machine.card:  # nvidia-smi is not to be found
        card = torch.cuda.get_device_name(device)
        begun = replace(begun, machine=replace(begun.machine, card=card, driver="unknown"))
    report = Report(begun, path)
    with report.section(args.section) as section:
        section_of(args)(section, device)
    return EXIT_FAILED if report.has_failed else 0


def section_of(args: argparse.Namespace) -> Callable[[Section, torch.device], None]:
    """Imports what a section needs only for it: without the native part, some can't be."""
    from tests.gpu.model_shapes import LLAMA_8B, TINY

    shape = {"llama": LLAMA_8B, "tiny": TINY}[args.shape]
    match args.section:
        case "machine":
            return lambda section, device: describe(section, device, args.only)
        case "attention":
            from tests.gpu.attention_section import check_attention_section
            from tests.gpu.recurrence_section import check_recurrence_section

            def check_kernels(section: Section, device: torch.device) -> None:
                check_attention_section(section, device)
                check_recurrence_section(section, device)

            return check_kernels
        case "kinds":
            from tests.gpu.attention_section import check_kinds_section

            return check_kinds_section
        case "experts":
            from tests.gpu.experts_section import check_experts_section

            return check_experts_section
        case "transfer":
            from tests.gpu.transfer_section import check_transfer_section

            return lambda section, device: check_transfer_section(
                section, device, TRANSFER_NBYTES[device.type]
            )
        case "sizes":
            from tests.gpu.sizes_section import check_sizes_section

            return check_sizes_section
        case "pair":
            from tests.gpu.pair_section import check_pair_section

            return lambda section, device: check_pair_section(section, device.type, shape)
        case "load_single" | "load_pair":
            from tests.gpu.load_section import check_load_section

            is_pair = args.section == "load_pair"
            return lambda section, device: check_load_section(
                section, device.type, shape, is_pair=is_pair
            )
        case "engine":
            from tests.gpu.engine_section import check_engine_section

            return lambda section, device: check_engine_section(section, device, shape)
        case "launch":
            from tests.gpu.launch_section import check_launch_section

            return lambda section, device: check_launch_section(section, device, shape)
    raise AssertionError(args.section)


def describe(section: Section, device: torch.device, only: tuple[str, ...]) -> None:
    """The device, the native part, which it builds, and what this check leaves out."""
    import torch

    from tests.gpu.native_build import build_native

    if device.type == "cuda":
        section.figure("memory GiB", torch.cuda.mem_get_info(device)[1] / (1 << 30))
        section.figure("torch's CUDA", str(torch.version.cuda))
    else:
        section.skip("everything on a GPU", "this is a rehearsal on the CPU")
    section.figure("native part", build_native())
    section.skip("several GPUs", "one device is used; tensor parallel ranks did not run on CUDA")
    section.skip("RDMA", "both ends are on one host")
    for name in SECTIONS:
        if name not in only:
            section.skip(name, "--only left it out")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/check.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--only", type=sections_of, default=SECTIONS)
    parser.add_argument("--out", default="")
    parser.add_argument("--commit", default="")
    # Of the processes that this one starts.
    parser.add_argument("--section", choices=("machine", *SECTIONS), help=argparse.SUPPRESS)
    return parser.parse_args()


def sections_of(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: must be of {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
