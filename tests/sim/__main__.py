"""`python -m tests.sim`: run many stories on all cores, plant bugs, or tell one story again.

--seeds N [--first S]       N stories; a failing seed is named, with the command that replays it
--mutations [--seeds N]     plant every bug and say which seed finds it, of at most N
--replay SEED [--request R] tell what happened, of one request or of all
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

import pytest

from tests.sim.mutations import MUTATIONS
from tests.sim.story import run_story

MUTATION_SEED_MAX = 1000
CHUNK_SEEDS = 50
TOLD_LINES_MAX = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--request", type=int, default=0)
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay, options.request)
    with ProcessPoolExecutor(options.jobs) as processes:
        if options.mutations:
            return plant_all(processes, options.seeds or MUTATION_SEED_MAX)
        return run_all(processes, range(options.first, options.first + (options.seeds or 1000)))


def problem_of(seed: int, mutation_index: int = -1) -> str:
    """What is wrong with a seed's story, "" if nothing is. What is broken may raise anything."""
    with pytest.MonkeyPatch.context() if mutation_index >= 0 else nullcontext() as patch:
        if patch is not None:
            MUTATIONS[mutation_index].plant(patch)
        try:
            run_story(seed)
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


# ---- many stories --------------------------------------------------------------------------------


def run_all(processes: ProcessPoolExecutor, seeds: range) -> int:
    began_at = time.monotonic()
    starts = range(seeds.start, seeds.stop, CHUNK_SEEDS)
    chunks = [range(start, min(start + CHUNK_SEEDS, seeds.stop)) for start in starts]
    told_count = failed_count = 0
    for chunk, problems in zip(chunks, processes.map(run_chunk, chunks), strict=True):
        for seed, problem in problems:
            failed_count += 1
            found = re.search(r"request (\d+)", problem)
            request = f" --request {found[1]}" if found else ""
            print(f"seed {seed}: {problem}")
            print(f"replay: python -m tests.sim --replay {seed}{request}", flush=True)
        told_count += len(chunk)
        if told_count % 500 == 0:
            print(f"{told_count} stories told", flush=True)
    rate = told_count / (time.monotonic() - began_at)
    print(f"{told_count - failed_count} passed, {failed_count} failed ({rate:.1f} stories/s)")
    return 1 if failed_count else 0


def run_chunk(seeds: range) -> list[tuple[int, str]]:
    """Seeds whose stories fail, and why."""
    return [(seed, problem) for seed in seeds if (problem := problem_of(seed))]


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


def replay(seed: int, request_id: int) -> int:
    """Tell a story again: the end of all of it, or what concerns one request."""
    log: list[str] = []
    problem = ""
    try:
        run_story(seed, log=log)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    for line in list(of_request(log, request_id))[-TOLD_LINES_MAX:]:
        print(line)
    print(f"seed {seed}: {problem or 'nothing is wrong'}")
    return 1 if problem else 0


def of_request(log: list[str], request_id: int) -> Iterator[str]:
    """Accidents, and the lines that name a request or one of its hand-overs; all for 0.

    Servers number their requests alike only at their clients' side: a hand-over is known by its
    id, which is told in the same moment in which its request's pages are reserved.
    """
    words = [f"request_id={request_id},", f"request_id={request_id})"]
    prompt = ""
    for line in log:
        is_accident = "(" not in line
        if not request_id or is_accident:
            yield line
            continue
        if f"Submit(request_id={request_id}," in line:
            prompt = line.partition("token_ids=[")[2].partition("]")[0]
        if prompt and "TransferRequest(" in line and f"token_ids=[{prompt}" in line:
            words.append(line.partition("transfer_id=")[2].partition(",")[0])
        if any(word in line for word in words):
            yield line


if __name__ == "__main__":
    sys.exit(main())
