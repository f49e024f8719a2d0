"""python -m bench.simulator profile | compare | size: how many servers a load needs.

    profile   measure a running pair that is idle, and write what its work costs
    compare   what a profile predicts of `python -m bench goodput` against what that measured
    size      the fewest servers that keep a promise, for a trace or a rate

Exit code 0 if it could be answered, 1 if no count of servers is enough, 2 for unusable input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.sending import load_settings, send_to
from bench.serve.workload import Ask, make_workload
from bench.simulator.calibrate import Calibration, Ranges
from bench.simulator.comparison import print_comparison
from bench.simulator.profile import Profile, read_profile, write_profile
from bench.simulator.sizing import Answer, Size, Sizing
from bench.slo import Slo
from common.errors import ConfigError

EXIT_NOT_ENOUGH = 1
EXIT_UNUSABLE = 2
COUNT_MAX = 64
VOCAB_SIZE_MIN = 2  # what tokens are is nothing to a simulation
PROFILE_PATH = Path("profile.json")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.command == "profile":
            return _profile(options)
        if options.command == "compare":
            return _compare(options)
        return _size(options)
    except ConfigError as exc:
        sys.stderr.write(f"bench.simulator: {exc}\n")
        return EXIT_UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    profile = commands.add_parser("profile", help="measure an idle pair")
    profile.add_argument("--url", required=True, help="of its decode server")
    profile.add_argument(
        "--input-lens", type=_counts, default=(64, 256, 512, 1024), help="prompts that are tried"
    )
    profile.add_argument(
        "--streams", type=_counts, default=(1, 2, 4, 8, 16), help="that are tried together"
    )
    profile.add_argument("--rounds", type=int, default=3, help="how often each is tried")
    profile.add_argument("--out", type=Path, default=PROFILE_PATH)
    compare = commands.add_parser("compare", help="what `python -m bench goodput` left behind")
    compare.add_argument("--profile", type=Path, help="another one than it measured itself")
    size = commands.add_parser("size", help="how many servers?")
    size.add_argument("--profile", type=Path, default=PROFILE_PATH)
    load = size.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", type=Path, help="of any format that `bench serve` reads")
    load.add_argument("--rate", type=float, help="requests per second, a Poisson process")
    size.add_argument("--input-len", type=int, default=1024, help="tokens of a prompt")
    size.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    size.add_argument("--requests", type=int, default=400, help="that are simulated")
    size.add_argument("--ttft", type=float, required=True, help="ms until the first token")
    size.add_argument("--itl", type=float, required=True, help="ms from token to token")
    size.add_argument("--percentile", type=float, default=90.0, help="of both, below 100")
    size.add_argument("--max-servers", type=int, default=COUNT_MAX, help="of each kind")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be numbers from 1 on, comma separated")
    return counts


# ---- commands ------------------------------------------------------------------------------------


def _profile(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be 1 or more")
    url = options.url.rstrip("/")
    ranges = Ranges(options.input_lens, options.streams)
    try:
        calibration = Calibration(url, partial(send_to, [url]), ranges)
        for _ in range(options.rounds):
            calibration.run_round()
    except (OSError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"--url {url}: could not be measured: {exc}") from exc
    write_profile(calibration.profile(), options.out)
    print(f"written to {options.out}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    # Only now: its servers are of the demo, which is not installed with the tools.
    from bench.goodput import PROFILE_PATH as MEASURED_TOO
    from bench.goodput import SLO, predict, read_measured

    profile = read_profile(options.profile or MEASURED_TOO)
    print_comparison(read_measured(), predict(profile), SLO)
    return 0


def _size(options: argparse.Namespace) -> int:
    profile = read_profile(options.profile)
    slo = Slo(options.ttft, options.itl, options.percentile)
    if not (options.ttft > 0 and options.itl > 0 and 0 < options.percentile < 100):
        raise ConfigError("--ttft, --itl: must be above 0, --percentile between 0 and 100")
    if not 1 <= options.max_servers <= 1024:
        raise ConfigError(f"--max-servers {options.max_servers}: must be in 1..1024")
    asks = _workload(options)
    answer = Sizing(profile, asks, slo, options.max_servers).answer()
    _print_answer(answer, slo, options.max_servers, profile)
    return EXIT_NOT_ENOUGH if answer.pairs is None and answer.singles is None else 0


def _workload(options: argparse.Namespace) -> list[Ask]:
    """Through the load tool's own settings, which check every value."""
    if options.trace is not None:
        flags = ["--dataset-name", "trace", "--dataset-path", str(options.trace)]
    else:
        flags = ["--request-rate", str(options.rate), "--num-prompts", str(options.requests)]
        flags += ["--random-input-len", str(options.input_len)]
        flags += ["--random-output-len", str(options.output_len)]
    return make_workload(load_settings(*flags), VOCAB_SIZE_MIN)


def _print_answer(answer: Answer, slo: Slo, count_max: int, profile: Profile) -> None:
    print(f"servers as of: {profile.source}")
    for what, size, best in (
        ("prefill and decode servers", answer.pairs, answer.best_pairs),
        ("single servers", answer.singles, answer.best_singles),
    ):
        if size is not None:
            print(f"{what}: {_counted(size)}; {_latencies(size, slo)}")
        else:
            print(f"{what}: up to {count_max} of a kind are not enough; {_latencies(best, slo)}")


def _counted(size: Size) -> str:
    if not size.prefill_count:
        return str(size.decode_count)
    return f"{size.prefill_count} prefill, {size.decode_count} decode"


def _latencies(size: Size, slo: Slo) -> str:
    return (
        f"TTFT p{slo.rank:g} {size.ttft_ms:.0f} ms (at most {slo.ttft_ms:g}), "
        f"ITL p{slo.rank:g} {size.itl_ms:.1f} ms (at most {slo.itl_ms:g})"
    )


if __name__ == "__main__":
    sys.exit(main())
