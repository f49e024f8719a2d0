"""The planner's property test over any number of cases: what `make sim` runs, on every core.

python -m tests.planner.sweep --examples 20000 --seed 1
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.planner.cases import Case, cases
from tests.planner.test_copies import check_case

EITHER = st.one_of(cases(), cases(has_prefix=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    share = -(-arguments.examples // arguments.processes)
    seeds = [arguments.seed * arguments.processes + index for index in range(arguments.processes)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, collect_rarely) as pool:
        counts = pool.starmap(sweep, [(share, seed_value) for seed_value in seeds])
    print(f"{sum(counts)} cases, seeds {seeds}: every byte was written once and is right")
    return 0


def collect_rarely() -> None:
    """Cases leave few cycles behind, and what was imported none: a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def sweep(example_count: int, seed_value: int) -> int:
    """Check that many cases; returns how many. Raises: AssertionError with the smallest one found
    that fails."""
    count = 0

    @seed(seed_value)
    @settings(
        max_examples=example_count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(EITHER)
    def check(case: Case) -> None:
        nonlocal count
        count += 1
        if count % 1000 == 0:
            print(f"seed {seed_value}: {count} of {example_count}", flush=True)
        check_case(case)

    check()
    return count


if __name__ == "__main__":
    sys.exit(main())
