"""`python -m tests.faults [--faults N] [--cases NAME,...]`: break a pair and see what it costs.

Real processes and real UCX, killed, frozen and restarted under load. Exit code 0 if in every case
nothing hung, nothing was wrong, every page came back and the pair healed by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.cases import TRANSPORTS, Case, Phase, Scene, draw_schedule, find_cases
from tests.faults.isolation import ISOLATED, SHARED_MEMORY, run_isolated, settle_in
from tests.faults.keeper import Keeper
from tests.faults.run import Report, Stage
from tests.faults.scenes import COMMON_ARGS, Settings, open_pair, settings_of
from tests.faults.strikes import Striker
from tests.soak.golden import Golden, draw_prompts, take_goldens
from tests.soak.growth import Growth, UseLog
from tests.soak.servers import start_lone
from tests.soak.verdicts import Verdict

OUTPUT_TOKENS_MAX = 64
# A process is looked at after every case; fewer looks say nothing of growth.
OUTLIVED_COUNT_MIN = 10
WARM_UP_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--cases", default="", help="comma-separated names; all if not given")
    parser.add_argument("--transport", default="", help="shm, stream or ucx-tcp; all if not given")
    parser.add_argument("--faults", type=int, default=0, help="so many, on all transports together")
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat, at random, this long")
    parser.add_argument("--keys", action="store_true", help="control channel and streams with keys")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(ISOLATED, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    transports = (options.transport,) if options.transport else TRANSPORTS
    if not set(transports) <= set(TRANSPORTS):
        parser.error(f"--transport {options.transport}: must be of {', '.join(TRANSPORTS)}")
    try:
        cases = find_cases(options.cases)
    except ValueError as error:
        parser.error(str(error))
    if not options.isolated:
        run_isolated("tests.faults", sys.argv[1:])
    if options.isolated:
        settle_in()
    elif any(case.needs_root for case in cases):
        skipped = [case.name for case in cases if case.needs_root]
        cases = [case for case in cases if not case.needs_root]
        print(f"skipped, as only root can make file systems and networks: {', '.join(skipped)}")
    left_before = set(SHARED_MEMORY.iterdir())
    settings = Settings(
        options.clients, options.seed, is_isolated=options.isolated, has_keys=options.keys
    )
    duration_s = options.minutes * 60
    outcome = asyncio.run(run_all(cases, transports, duration_s, settings, options.faults))
    left = sorted(path.name for path in set(SHARED_MEMORY.iterdir()) - left_before)
    return conclude(outcome, left)


def conclude(outcome: Outcome, left: list[str]) -> int:
    """Print what came of it all; the exit code. left: what is in /dev/shm and was not before."""
    reports = outcome.reports
    bad = [report for report in reports if report.problems]
    print(f"\n{Report.HEAD}")
    for report in reports:
        print(report.row)
    for report in bad:
        for problem in report.problems:
            print(f"OFF: {report.name}: {problem}")
    if left:
        print(f"OFF: left in {SHARED_MEMORY}: {', '.join(left)}")
    hit = ", ".join(f"{phase} {outcome.strike_counts[phase]}" for phase in Phase)
    print(f"faults that struck while something was in this phase: {hit}")
    heals = sorted(report.heal_s for report in reports)
    if heals:
        print(f"seconds to heal: median {statistics.median(heals):.1f}, longest {heals[-1]:.1f}")
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """strike_counts: faults that struck while something was in that phase."""

    reports: list[Report]
    strike_counts: Counter[Phase]


async def run_all(
    cases: list[Case],
    transports: tuple[str, ...],
    duration_s: float,
    settings: Settings,
    fault_count: int = 0,
) -> Outcome:
    """All cases once on each of their transports, or as often as it takes for `fault_count`; then
    at random until the time is over."""
    goldens = await learn(settings)
    reports: list[Report] = []
    strike_counts: Counter[Phase] = Counter()
    end_at = time.monotonic() + duration_s
    rng = random.Random(settings.seed)
    while True:
        for transport in transports:
            chosen = [case for case in cases if transport in case.transports]
            if fault_count:
                share = -(-fault_count // len(transports))
                chosen = draw_schedule(chosen, share, f"{settings.seed} {transport}")
            for scene in Scene:
                there = [case for case in chosen if case.scene is scene]
                suited = settings_of(scene, settings)
                reports += await run_on(transport, scene, there, goldens, suited, strike_counts)
        if time.monotonic() >= end_at:
            return Outcome(reports, strike_counts)
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
    transport: str,
    scene: Scene,
    cases: list[Case],
    goldens: list[Golden],
    settings: Settings,
    strike_counts: Counter[Phase],
) -> list[Report]:
    """The cases one after another on one pair; a pair that failed a case is replaced."""
    reports: list[Report] = []
    queue = list(cases)
    while queue:
        async with open_pair(transport, scene, settings) as (pair, hosts):
            print(f"\n{transport} {scene}: logs in {pair.log_dir}\n{Report.HEAD}", flush=True)
            keeper = Keeper(pair)
            keeper.start()
            uses = UseLog(WARM_UP_S)
            try:
                async with Striker(pair, strike_counts, hosts) as striker:
                    stage = Stage(pair, keeper, striker, goldens, settings)
                    while queue:
                        report = await stage.run(queue.pop(0))
                        report.name = f"{transport} {report.name}"
                        reports.append(report)
                        uses.sample(pair.servers)
                        _tell(report)
                        if report.problems:
                            break
            finally:
                await keeper.stop()
            reports[-1].problems += _find_growth(uses)
            if not reports[-1].problems:
                codes = await pair.stop()
                if codes != [0, 0]:
                    reports[-1].problems.append(f"exit codes at the end: {codes}")
        if not reports[-1].problems:
            pair.remove_logs()
    return reports


def _find_growth(uses: UseLog) -> list[str]:
    """What has grown in processes that outlived many faults, which are told of."""
    growths = uses.growths(OUTLIVED_COUNT_MIN)
    if growths:
        print(f"\n{'outlived its faults':<22}{Growth.HEAD}")
    for one in growths:
        print(f"{one.process:<22}{one.row}")
    return [one.problem for one in growths if one.problem]


def _tell(report: Report) -> None:
    print(report.row)
    for line in report.details:
        print(f"    {line}")
    for problem in report.problems:
        print(f"    OFF: {problem}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
