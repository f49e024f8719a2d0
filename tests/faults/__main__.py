"""`python -m tests.faults [--faults N] [--cases NAME,...]`: break a pair and see what it costs.

Real processes and real UCX, killed, frozen and restarted under load. Exit code 0 if in every case
nothing hung, nothing was wrong, every page came back and the pair healed by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.faults.cases import TRANSPORTS, Case, draw_schedule, find_cases
from tests.faults.keeper import Keeper
from tests.faults.run import COMMON_ARGS, Report, Settings, Stage
from tests.soak.golden import Golden, draw_prompts, take_goldens
from tests.soak.servers import ServerPair, start_lone
from tests.soak.verdicts import Verdict

OUTPUT_TOKENS_MAX = 64
SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--cases", default="", help="comma-separated names; all if not given")
    parser.add_argument("--transport", default="", help="shm or tcp; both if not given")
    parser.add_argument("--faults", type=int, default=0, help="so many, on all transports together")
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat, at random, this long")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    transports = (options.transport,) if options.transport else TRANSPORTS
    if not set(transports) <= set(TRANSPORTS):
        parser.error(f"--transport {options.transport}: must be of {', '.join(TRANSPORTS)}")
    try:
        cases = find_cases(options.cases)
    except ValueError as error:
        parser.error(str(error))
    left_before = set(SHARED_MEMORY.iterdir())
    settings = Settings(options.clients, options.seed)
    duration_s = options.minutes * 60
    reports = asyncio.run(run_all(cases, transports, duration_s, settings, options.faults))
    left = sorted(path.name for path in set(SHARED_MEMORY.iterdir()) - left_before)
    bad = [report for report in reports if report.problems]
    print(f"\n{Report.HEAD}")
    for report in reports:
        print(report.row)
    for report in bad:
        for problem in report.problems:
            print(f"OFF: {report.name}: {problem}")
    if left:
        print(f"OFF: left in {SHARED_MEMORY}: {', '.join(left)}")
    fault_count = sum(report.fault_count for report in reports)
    hangs, wrongs = (sum(r.counts[v] for r in reports) for v in (Verdict.HANG, Verdict.WRONG))
    sent_count = sum(report.sent_count for report in reports)
    leaked_count = sum(report.leaked_count for report in reports)
    print(
        f"{fault_count} faults under {sent_count} requests: {hangs} hangs, {wrongs} wrong answers, "
        f"{leaked_count} pages leaked"
    )
    print(f"{len(reports) - len(bad)} cases passed, {len(bad)} failed")
    return 1 if bad or left else 0


async def run_all(
    cases: list[Case],
    transports: tuple[str, ...],
    duration_s: float,
    settings: Settings,
    fault_count: int = 0,
) -> list[Report]:
    """All cases once on each of their transports, or as often as it takes for `fault_count`; then
    at random until the time is over."""
    goldens = await learn(settings)
    reports: list[Report] = []
    end_at = time.monotonic() + duration_s
    rng = random.Random(settings.seed)
    while True:
        for transport in transports:
            chosen = [case for case in cases if transport in case.transports]
            if fault_count:
                share = -(-fault_count // len(transports))
                chosen = draw_schedule(chosen, share, f"{settings.seed} {transport}")
            reports += await run_on(transport, chosen, goldens, settings)
        if time.monotonic() >= end_at:
            return reports
        settings = replace(settings, seed=rng.getrandbits(31))
        rng.shuffle(cases)


async def learn(settings: Settings) -> list[Golden]:
    """Right answers of a server that computes alone."""
    prompts = draw_prompts(settings.seed, settings.golden_count, OUTPUT_TOKENS_MAX)
    with tempfile.TemporaryDirectory(prefix="baton-test-") as log_dir:
        lone = await start_lone(COMMON_ARGS, Path(log_dir) / "single.log")
        try:
            return await take_goldens(lone.url, prompts)
        finally:
            lone.kill()


async def run_on(
    transport: str, cases: list[Case], goldens: list[Golden], settings: Settings
) -> list[Report]:
    """The cases one after another on one pair; a pair that failed a case is replaced."""
    timeout = str(settings.request_timeout_s)
    args = (*COMMON_ARGS, "--request-timeout", timeout, "--transport", transport)
    reports: list[Report] = []
    queue = list(cases)
    while queue:
        async with ServerPair(args) as pair:
            print(f"\n{transport}: logs in {pair.log_dir}\n{Report.HEAD}", flush=True)
            keeper = Keeper(pair)
            keeper.start()
            stage = Stage(pair, keeper, goldens, settings)
            try:
                while queue:
                    report = await stage.run(queue.pop(0))
                    report.name = f"{transport} {report.name}"
                    reports.append(report)
                    _tell(report)
                    if report.problems:
                        break
            finally:
                await keeper.stop()
            if reports[-1].problems:
                continue
            codes = await pair.stop()
            if codes == [0, 0]:
                pair.remove_logs()
            else:
                reports[-1].problems.append(f"exit codes at the end: {codes}")
    return reports


def _tell(report: Report) -> None:
    print(report.row)
    for line in report.details:
        print(f"    {line}")
    for problem in report.problems:
        print(f"    OFF: {problem}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
