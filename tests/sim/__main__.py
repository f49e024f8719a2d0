"""`python -m tests.sim --seeds N [--first S]`: run many stories; a failing seed is named."""

from __future__ import annotations

import argparse
import sys

from tests.sim.story import run_story


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.seeds):
        try:
            run_story(seed)
        except AssertionError as error:
            print(f"seed {seed}: {error}\nreplay: python -m tests.sim --first {seed} --seeds 1")
            return 1
        if seed % 500 == 499:
            print(f"{seed + 1 - options.first} stories told", flush=True)
    print(f"{options.seeds} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
