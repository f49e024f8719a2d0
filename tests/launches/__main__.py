"""python -m tests.launches [name ...]: launches of a decode step on a GPU, counted without one."""

from __future__ import annotations

import argparse

from tests.launches.shapes import SHAPES
from tests.launches.step import DRAWN, GREEDY, count_step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.launches", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--list", action="store_true", help="say what is launched as well")
    arguments = parser.parse_args()
    for name in arguments.names or SHAPES:
        for kind, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
            count = count_step(name, sampling)
            print(f"{name}, {kind}: {count.outside} outside of layers")
            for layer, launches in count.layers.items():
                print(f"    {launches:4}  {layer}")
            if arguments.list:
                for place, names in count.names.items():
                    print(f"    {place}: {', '.join(f'{n} {k}' for k, n in names.items())}")


if __name__ == "__main__":
    main()
