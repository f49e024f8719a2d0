"""The planner's property test over any number of cases: what `make sim` runs.

python -m tests.planner.sweep --examples 20000 --seed 1
"""

from __future__ import annotations

import argparse
import sys

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.planner.cases import Case, cases
from tests.planner.test_copies import check_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = 0

    @seed(arguments.seed)
    @settings(
        max_examples=arguments.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: Case) -> None:
        nonlocal count
        count += 1
        if count % 1000 == 0:
            print(f"{count} of {arguments.examples}", flush=True)
        check_case(case)

    check()
    print(f"{count} cases, seed {arguments.seed}: every byte was written once and is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
