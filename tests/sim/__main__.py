"""`python -m tests.sim`: run many stories on all cores, plant bugs, or tell one story again.

--seeds N [--first S]       N stories; a failing seed is named, with the command that replays it
--fleet                     64 servers of each role and a long queue: is the work even, and what do
                            their schedulers take
--mutations [--seeds N]     plant every bug and say which seed finds it, of at most N
--replay SEED               tell what happened: [--request R | --transfer T] of one request or
                            transfer, [--plant NAME] with a planted bug
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import pytest

from tests.sim import (
    mutations_peers,
    mutations_succession,
    mutations_switches,
    mutations_upgrades,
)
from tests.sim.fleet import tell_large
from tests.sim.mutations import MUTATIONS
from tests.sim.planted import Mutation
from tests.sim.replay import concerned, of_all, of_request, of_transfer, shown
from tests.sim.speculation import SPECULATION_SHARE
from tests.sim.story import run_story
from tests.sim.switches import SWITCH_SHARE
from tests.sim.tally import table
from tests.sim.upgrades import UPGRADE_SHARE

MUTATION_SEED_MAX = 1000
CHUNK_SEEDS = 50
TOLD_LINES_MAX = 400
# Bugs that are planted into stories with everything in them.
WHOLE = (*mutations_switches.MUTATIONS, *mutations_upgrades.MUTATIONS)
# What a broken core may raise.
BROKEN = (AssertionError, LookupError, TypeError, ValueError, AttributeError)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fleet", action="store_true")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--request", type=int, default=0)
    parser.add_argument("--transfer", type=int, default=0)
    parser.add_argument("--plant", choices=[mutation.name for mutation in MUTATIONS])
    options = parser.parse_args()
    if options.fleet:
        return tell_large()
    if options.replay is not None:
        return replay(options.replay, options.request, options.transfer, options.plant)
    with ProcessPoolExecutor(options.jobs) as processes:
        if options.mutations:
            return plant_all(processes, options.seeds or MUTATION_SEED_MAX)
        return run_all(processes, range(options.first, options.first + (options.seeds or 1000)))


def has_two_steps(seed: int) -> bool:
    """Of every second story. Where bugs are planted, none has, nor do servers come and go, but for
    bugs of that: so pinned seeds stay."""
    return seed % 2 == 1


def has_moves(seed: int) -> bool:
    """Of every second of the others."""
    return seed % 4 == 2


def problem_of(seed: int, mutation_index: int = -1, log: list[str] | None = None) -> str:
    """What is wrong with a seed's story, "" if nothing is. What is broken may raise anything."""
    with pytest.MonkeyPatch.context() if mutation_index >= 0 else nullcontext() as patch:
        if patch is not None:
            MUTATIONS[mutation_index].plant(patch)
        try:
            is_sound = mutation_index < 0
            planted = None if is_sound else MUTATIONS[mutation_index]

            # Of changes that are planned there are enough in stories with everything else.
            is_whole = is_sound or planted in WHOLE

            def has(bugs: tuple[Mutation, ...]) -> bool:
                return is_whole or planted in bugs

            def share(usual: float, bugs: tuple[Mutation, ...]) -> float:
                return 1.0 if planted in bugs else usual * is_whole

            run_story(
                seed,
                has_two_steps=is_whole and has_two_steps(seed),
                has_moves=is_whole and has_moves(seed),
                has_comings=has(mutations_peers.MUTATIONS),
                has_claims=planted is None or is_whole or planted.has_claims,
                has_successions=has(mutations_succession.MUTATIONS),
                speculation_share=SPECULATION_SHARE if is_sound else planted_share(planted),
                switch_share=share(SWITCH_SHARE, mutations_switches.MUTATIONS),
                upgrade_share=share(UPGRADE_SHARE, mutations_upgrades.MUTATIONS),
                log=log,
            )
        except BROKEN as error:
            return told_as(error)
    return ""


def planted_share(planted: Mutation | None) -> float:
    """Of stories with a planted bug, how many verify proposals."""
    return 1.0 if planted is not None and planted.has_proposals else 0.0


def told_as(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ---- many stories --------------------------------------------------------------------------------


def run_all(processes: ProcessPoolExecutor, seeds: range) -> int:
    began_at = time.monotonic()
    starts = range(seeds.start, seeds.stop, CHUNK_SEEDS)
    chunks = [range(start, min(start + CHUNK_SEEDS, seeds.stop)) for start in starts]
    told_count = failed_count = 0
    tallies: list[Counter[str]] = []
    results = processes.map(run_chunk, chunks)
    for chunk, (problems, told) in zip(chunks, results, strict=True):
        tallies += told
        for seed, problem in problems:
            failed_count += 1
            words = " ".join(["python -m tests.sim --replay", str(seed), *concerned(problem)])
            print(f"seed {seed}: {problem}\nreplay: {words}", flush=True)
        told_count += len(chunk)
        if told_count % 500 == 0:
            print(f"{told_count} stories told", flush=True)
    print("\n".join(table(tallies)))
    rate = told_count / (time.monotonic() - began_at)
    print(f"{told_count - failed_count} passed, {failed_count} failed ({rate:.1f} stories/s)")
    return 1 if failed_count else 0


def run_chunk(seeds: range) -> tuple[list[tuple[int, str]], list[Counter[str]]]:
    """Seeds whose stories fail, and why; what happened in each of the others."""
    problems: list[tuple[int, str]] = []
    tallies: list[Counter[str]] = []
    for seed in seeds:
        try:
            world = run_story(seed, has_two_steps=has_two_steps(seed), has_moves=has_moves(seed))
            tallies.append(world.tally)
        except BROKEN as error:
            problems.append((seed, told_as(error)))
    return problems, tallies


# ---- planted bugs --------------------------------------------------------------------------------


def plant_all(processes: ProcessPoolExecutor, seed_max: int) -> int:
    """A table of what finds each planted bug; 1 if one is not found."""
    indexes = range(len(MUTATIONS))
    print(f"{'planted bug':<38}{'found by seed':>14}{'stories':>9}  how")
    lost: list[str] = []
    jobs = processes.map(find_first, indexes, [seed_max] * len(indexes))
    for mutation, (seed, problem) in zip(MUTATIONS, jobs, strict=True):
        if seed < 0:
            lost.append(mutation.name)
        number = str(seed) if seed >= 0 else "none"
        count = seed + 1 if seed >= 0 else seed_max
        print(f"{mutation.name:<38}{number:>14}{count:>9}  {problem[:90]}", flush=True)
    print(f"{len(MUTATIONS) - len(lost)} found, {len(lost)} not found {' '.join(lost)}".rstrip())
    return 1 if lost else 0


def find_first(mutation_index: int, seed_max: int) -> tuple[int, str]:
    """The first seed that finds a planted bug, -1 if none does, and what it says."""
    for seed in range(seed_max):
        if problem := problem_of(seed, mutation_index):
            return seed, problem
    return -1, ""


# ---- one story -----------------------------------------------------------------------------------


def replay(seed: int, request_id: int, transfer_id: int, planted: str | None) -> int:
    """Tell a story again: the end of all of it, or what concerns one request or transfer."""
    log: list[str] = []
    names = [mutation.name for mutation in MUTATIONS]
    problem = problem_of(seed, names.index(planted) if planted else -1, log)
    lines = of_all(log)
    if request_id:
        lines = of_request(log, request_id)
    elif transfer_id:
        lines = of_transfer(log, transfer_id)
    for line in list(lines)[-TOLD_LINES_MAX:]:
        print(shown(line))
    print(f"seed {seed}: {problem or 'nothing is wrong'}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
