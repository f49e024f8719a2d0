"""Builds, checks and times Baton on one GPU: `python tests/gpu/check.py`, a JSON report on stdout.

    --only attention,handover,pair   some of the sections
    --out FILE                       the report goes there as well
    --device cpu --shape tiny        a rehearsal of this script on a machine without a GPU

Exit code 0 if every check held, 1 if one failed, 2 if there is no device. What was not looked at
is under "skipped", with the reason. README.md beside this file says what a bare machine needs.

No machine with a GPU has run this yet: rehearsed on a CPU only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tests.gpu.report import Report

ROOT = Path(__file__).parents[2]
SECTIONS = ("attention", "handover", "pair")
PACKAGES = ("torch", "flashinfer-python", "libucx-cu12", "libucx-cu13", "numpy", "pyzmq")
HANDOVER_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def main() -> int:
    args = parse_args()
    # The servers are started as modules of the current directory.
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch

    from tests.gpu.native_build import build_native
    from tests.gpu.report import Report, say

    if args.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no CUDA device here; --device cpu --shape tiny rehearses this script")
        return 2
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    report = Report()
    with report.section("machine") as section:
        section.figure("python", platform.python_version())
        for package in PACKAGES:
            section.figure(package, version_of(package))
        if device.type == "cuda":
            section.figure("gpu", torch.cuda.get_device_name(device))
            section.figure("memory GiB", torch.cuda.mem_get_info(device)[1] / (1 << 30))
            section.figure("torch's CUDA", str(torch.version.cuda))
        else:
            section.skip("everything on a GPU", "this is a rehearsal on the CPU")
        section.figure("native part", build_native())
    if not report.has_failed:
        run_sections(report, args, device)
    text = json.dumps(report.as_dict(), indent=2)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    say(f"result: {report.as_dict()['result']}")
    return 1 if report.has_failed else 0


def run_sections(report: Report, args: argparse.Namespace, device: torch.device) -> None:
    """Imports what needs the native part only now that it is there."""
    from tests.gpu.attention_section import check_attention_section
    from tests.gpu.handover_section import check_handover_section
    from tests.gpu.model_shapes import LLAMA_8B, TINY
    from tests.gpu.pair_section import check_pair_section
    from tests.gpu.recurrence_section import check_recurrence_section

    if "attention" in args.only:
        with report.section("attention") as section:
            check_attention_section(section, device)
            check_recurrence_section(section, device)
    release(device)
    if "handover" in args.only:
        with report.section("handover") as section:
            check_handover_section(section, device, HANDOVER_NBYTES[device.type])
    release(device)
    if "pair" in args.only:
        with report.section("pair") as section:
            shape = {"llama": LLAMA_8B, "tiny": TINY}[args.shape]
            check_pair_section(section, args.device, shape)
    with report.section("not looked at") as section:
        section.skip(
            "several GPUs", "one device is used; tensor parallel ranks did not run on CUDA"
        )
        section.skip("RDMA", "both ends are on one host")
        for name in SECTIONS:
            if name not in args.only:
                section.skip(name, "--only left it out")


def release(device: torch.device) -> None:
    """Memory that a section kept would be missing to the next one's processes."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/check.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--only", type=sections_of, default=SECTIONS)
    parser.add_argument("--out", default="")
    return parser.parse_args()


def sections_of(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: must be of {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
