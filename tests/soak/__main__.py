"""`python -m tests.soak --minutes 30 --clients 20`: a pair under mixed load, watched all the time;
with `--fault-interval 20` also frozen and killed in parts, every 20 seconds or so.

Exit code 0 if every answer was right, typed or cut by us, no page is held at the end, and no
process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

from tests.soak.clients import Load, Target
from tests.soak.golden import draw_prompts, take_goldens
from tests.soak.growth import Growth, UseLog
from tests.soak.servers import ServerPair, start_lone
from tests.soak.troubles import Troubles
from tests.soak.verdicts import Verdict

GOLDEN_COUNT = 96
OUTPUT_TOKENS_MAX = 192
REQUEST_TIMEOUT_S = 60
# Beyond the server's own timeout: what the client's and the server's scheduling may add.
HANG_GRACE_S = 15.0
# The load pauses this long for pages to come back, which takes a round trip and no more.
REST_TIMEOUT_S = 30.0
SAMPLE_INTERVAL_S = 5.0
PROGRESS_INTERVAL_S = 10.0
WARM_UP_S = 300.0
# Of greedy requests that we do not cut: fewer right ones are a failure, however typed the errors.
RIGHT_SHARE_MIN = 0.99
SHOWN_COUNT_MAX = 20
SHARED_MEMORY = Path("/dev/shm")

COMMON_ARGS = (
    *("--dtype", "float32", "--cpu-threads", "1", "--log-level", "info"),
    *("--chunked-prefill-size", "512", "--request-timeout", str(REQUEST_TIMEOUT_S)),
)
# Small enough that decode has to retract now and then, large enough that prompts rarely wait.
PREFILL_POOL_ARGS = ("--max-total-tokens", "12288")
DECODE_POOL_ARGS = ("--max-total-tokens", "4096")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="fixes what is sent")
    parser.add_argument("--transport", default="auto", help="auto, shm or tcp")
    parser.add_argument("--fault-interval", type=float, default=0.0, help="seconds; 0: no faults")
    options = parser.parse_args()
    left_before = set(SHARED_MEMORY.iterdir())
    problems = asyncio.run(
        soak(
            options.minutes * 60,
            options.clients,
            options.seed,
            options.transport,
            options.fault_interval,
        )
    )
    left = sorted(path.name for path in set(SHARED_MEMORY.iterdir()) - left_before)
    if left:
        problems.append(f"left in {SHARED_MEMORY}: {', '.join(left)}")
    for problem in problems:
        print(f"OFF: {problem}")
    print("soak failed" if problems else "soak passed")
    return 1 if problems else 0


async def soak(
    duration_s: float, client_count: int, seed: int, transport: str, fault_interval_s: float
) -> list[str]:
    """Run it all; what was off, in words."""
    args = (*COMMON_ARGS, "--transport", transport)
    async with ServerPair(args, PREFILL_POOL_ARGS, DECODE_POOL_ARGS) as pair:
        print(f"logs in {pair.log_dir}; asking a single server for {GOLDEN_COUNT} right answers")
        lone = await start_lone(args, pair.log_dir / "single.log")
        try:
            goldens = await take_goldens(
                lone.url, draw_prompts(seed, GOLDEN_COUNT, OUTPUT_TOKENS_MAX)
            )
        finally:
            lone.kill()
        has_faults = fault_interval_s > 0
        target = Target(
            pair.urls,
            pair.bootstrap,
            REQUEST_TIMEOUT_S + HANG_GRACE_S,
            keeps_connections=not has_faults,
        )
        load = Load(target, goldens, seed, client_count)
        log = UseLog(warm_up_s=min(WARM_UP_S, duration_s / 3))
        print(f"prefill {pair.prefill.url}, decode {pair.decode.url}")
        print(f"{client_count} clients for {duration_s / 60:g} minutes, {len(goldens)} goldens")
        load.start()
        if has_faults:
            async with Troubles(pair, fault_interval_s, seed) as troubles:
                await _watch(pair, load, log, duration_s, may_end=True)
            print(f"{troubles.freeze_count} freezes, {troubles.kill_count} kills")
        else:
            await _watch(pair, load, log, duration_s)
        await load.stop()
        held_count = await pair.wait_at_rest(REST_TIMEOUT_S)
        log.sample(pair.servers)
        problems = _summarize(load, log.growths(), held_count, has_faults=has_faults)
        for server in pair.servers:
            look = await server.look()
            print(f"{server.role} server counted: {look.counters if look else 'no answer'}")
        codes = await pair.stop()
        if codes != [0, 0]:
            problems.append(f"exit codes of the servers: {codes}, expected 0")
        if not problems:
            pair.remove_logs()
        return problems


async def _watch(
    pair: ServerPair, load: Load, log: UseLog, duration_s: float, *, may_end: bool = False
) -> None:
    """Sample and report until the time is over. may_end: whether servers are ended by us."""
    began_at = time.monotonic()
    sampled_at = told_at = began_at
    while time.monotonic() - began_at < duration_s:
        await asyncio.sleep(0.5)
        load.check()
        now = time.monotonic()
        for server in pair.servers:
            if not server.is_running and not may_end:
                raise RuntimeError(f"the {server.role} server ended:\n{server.last_words()}")
        if now - sampled_at >= SAMPLE_INTERVAL_S:
            sampled_at = now
            log.sample(pair.servers)
        if now - told_at >= PROGRESS_INTERVAL_S:
            told_at = now
            await _tell(pair, load, log, now - began_at)


async def _tell(pair: ServerPair, load: Load, log: UseLog, elapsed_s: float) -> None:
    counts = load.counts()
    words = " ".join(f"{verdict} {counts[verdict]}" for verdict in Verdict if counts[verdict])
    looks = [await server.look() for server in pair.servers]
    held = "+".join("?" if look is None else str(look.held_count) for look in looks)
    open_count = load.sent_count - len(load.answers)
    print(
        f"{elapsed_s:6.0f} s  sent {load.sent_count} open {open_count} {words}  "
        f"pages held {held}  rss {log.total_rss_mb():.0f} MB  workers waited for a core "
        f"{log.starved_share('prefill worker'):.0%}+{log.starved_share('decode worker'):.0%}",
        flush=True,
    )


def _summarize(
    load: Load, growths: list[Growth], held_count: int, *, has_faults: bool
) -> list[str]:
    """Print the tables; what is off."""
    counts = load.counts()
    print("\nrequests")
    print(f"  {'sent':<12}{load.sent_count:>8}")
    for verdict in Verdict:
        print(f"  {verdict:<12}{counts[verdict]:>8}")
    details = Counter(
        f"{answer.verdict}: {answer.detail}" for answer in load.answers if answer.detail
    )
    for detail, count in details.most_common(SHOWN_COUNT_MAX):
        print(f"  {count:>5} x {detail}")
    print(f"\npages held at the end: {held_count}")
    print(f"\n{'process':<22}{Growth.HEAD}")
    for one in growths:
        print(f"{one.process:<22}{one.row}")
    problems = [one.problem for one in growths if one.problem]
    excused = (Verdict.CUT, Verdict.UNREACHABLE) if has_faults else ()
    for verdict in {Verdict.WRONG, Verdict.HANG, Verdict.CUT, Verdict.UNREACHABLE} - {*excused}:
        if counts[verdict]:
            problems.append(f"{counts[verdict]} requests: {verdict}")
    if load.sent_count != len(load.answers):
        problems.append(f"{load.sent_count - len(load.answers)} requests were never answered")
    asked_count = counts[Verdict.RIGHT] + counts[Verdict.ERROR]
    if not has_faults and (
        asked_count == 0 or counts[Verdict.RIGHT] / asked_count < RIGHT_SHARE_MIN
    ):
        problems.append(f"{counts[Verdict.RIGHT]} of {asked_count} answers are right")
    if held_count:
        problems.append(f"{held_count} pages were not given back")
    return problems


if __name__ == "__main__":
    sys.exit(main())
