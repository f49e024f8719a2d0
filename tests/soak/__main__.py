"""`python -m tests.soak --minutes 30 --clients 20`: a pair under mixed load, watched all the time;
with `--fault-interval 20` also frozen and killed in parts, every 20 seconds or so.

Some requests ask for several samples or go on from an answer; caches of answers go back, and
prefixes go to host memory. `--without samples,returns,tier` leaves parts of that out.

Exit code 0 if every answer was right, typed or cut by us, no page is held at the end, no process
has grown, and, after LONG_S, every feature was used.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.soak.clients import Load, Target
from tests.soak.features import CounterLog, Feature, flags_of
from tests.soak.golden import Golden, draw_prompts, take_conversations
from tests.soak.growth import UseLog
from tests.soak.plans import Mix, Side
from tests.soak.servers import Look, Server, ServerPair, read_or_empty, start_lone
from tests.soak.summary import summarize_answers, summarize_features, summarize_growth
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
# In a run as long as this every feature is used.
LONG_S = 300.0
SAMPLES_SHARE = 0.1
TURNS_SHARE = 0.3
SHARED_MEMORY = Path("/dev/shm")

COMMON_ARGS = (
    *("--dtype", "float32", "--cpu-threads", "1", "--log-level", "info"),
    *("--chunked-prefill-size", "512", "--request-timeout", str(REQUEST_TIMEOUT_S)),
)
# Small enough that decode has to retract now and then, large enough that prompts rarely wait.
PREFILL_POOL_ARGS = ("--max-total-tokens", "12288")
DECODE_POOL_ARGS = ("--max-total-tokens", "4096")


@dataclass(frozen=True, slots=True)
class Settings:
    """seed: fixes what is sent. fault_interval_s: 0 for no faults."""

    duration_s: float
    client_count: int
    seed: int
    transport: str
    fault_interval_s: float
    features: Collection[Feature]

    @property
    def has_faults(self) -> bool:
        return self.fault_interval_s > 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="fixes what is sent")
    parser.add_argument("--transport", default="auto", help="auto, shm, stream or ucx-tcp")
    parser.add_argument("--fault-interval", type=float, default=0.0, help="seconds; 0: no faults")
    parser.add_argument("--without", default="", help=f"some of {','.join(Feature)}")
    options = parser.parse_args()
    left_out = [name for name in options.without.split(",") if name]
    if not set(left_out) <= set(Feature):
        parser.error(f"--without {options.without}: must be of {', '.join(Feature)}")
    settings = Settings(
        options.minutes * 60,
        options.clients,
        options.seed,
        options.transport,
        options.fault_interval,
        [feature for feature in Feature if feature not in left_out],
    )
    problems = asyncio.run(soak(settings))
    for problem in problems:
        print(f"OFF: {problem}")
    print("soak failed" if problems else "soak passed")
    return 1 if problems else 0


async def soak(settings: Settings) -> list[str]:
    """Run it all; what was off, in words."""
    left_before = set(SHARED_MEMORY.iterdir())
    lone_args = (*COMMON_ARGS, "--transport", settings.transport)
    args = (*lone_args, *flags_of(settings.features))
    async with ServerPair(args, PREFILL_POOL_ARGS, DECODE_POOL_ARGS) as pair:
        print(f"logs in {pair.log_dir}; asking a single server for right answers", flush=True)
        # It computes every prompt from its first token.
        lone_args += ("--disable-radix-cache",)
        lone = await start_lone(lone_args, pair.log_dir / "single.log")
        try:
            goldens = await _learn(lone, settings.seed)
        finally:
            lone.kill()
        print(f"prefill {pair.prefill.url}, decode {pair.decode.url}")
        problems = await _soak_pair(settings, pair, goldens)
        codes = await pair.stop()
        if codes != [0, 0]:
            problems.append(f"exit codes of the servers: {codes}, expected 0")
        left = _left_behind(set(SHARED_MEMORY.iterdir()) - left_before, [*pair.servers, lone])
        if left:
            problems.append(f"left in {SHARED_MEMORY}: {', '.join(left)}")
        if not problems:
            pair.remove_logs()
        return problems


def _left_behind(paths: Collection[Path], servers: Collection[Server]) -> list[str]:
    """Names of those that may be of these servers, which have ended; others run here, too. A
    server's directory has the number of its process in its name, and UCX's files are mapped."""
    ours = {str(pid) for server in servers for pid in server.started_pids}
    mapped = "".join(map(read_or_empty, Path("/proc").glob("[0-9]*/maps")))
    return sorted(
        path.name
        for path in paths
        if (ours & set(path.name.split("-")))
        or (not path.name.startswith("baton-") and path.exists() and path.name not in mapped)
    )


async def _learn(lone: Server, seed: int) -> list[Golden]:
    """Right answers of a single server."""
    prompts = draw_prompts(seed, GOLDEN_COUNT, OUTPUT_TOKENS_MAX)
    goldens = await take_conversations(lone.url, prompts, seed, OUTPUT_TOKENS_MAX)
    turns = [golden.next_turn for golden in goldens if golden.next_turn is not None]
    token_count = sum(len(golden.output_ids) for golden in [*goldens, *turns])
    print(f"{len(goldens)} goldens, {len(turns)} next turns, {token_count} tokens of answers")
    return goldens


async def _soak_pair(settings: Settings, pair: ServerPair, goldens: list[Golden]) -> list[str]:
    """Load a pair until the time is over, and look at what it holds then; what was off."""
    target = Target(
        pair.urls,
        pair.bootstrap,
        REQUEST_TIMEOUT_S + HANG_GRACE_S,
        keeps_connections=not settings.has_faults,
    )
    mix = Mix(SAMPLES_SHARE if Feature.SAMPLES in settings.features else 0.0, TURNS_SHARE)
    load = Load(target, goldens, settings.seed, settings.client_count, mix)
    uses = UseLog(warm_up_s=min(WARM_UP_S, settings.duration_s / 3))
    counters = CounterLog(settings.features)
    print(f"{settings.client_count} clients for {settings.duration_s / 60:g} minutes")
    load.start()
    watch = Watch(pair, load, uses, counters)
    if settings.has_faults:
        async with Troubles(pair, settings.fault_interval_s, settings.seed) as troubles:
            await watch.run(settings.duration_s, may_end=True)
        print(f"{troubles.freeze_count} freezes, {troubles.kill_count} kills")
    else:
        await watch.run(settings.duration_s)
    await load.stop()
    return await _conclude(settings, pair, load, uses, counters)


async def _conclude(
    settings: Settings, pair: ServerPair, load: Load, uses: UseLog, counters: CounterLog
) -> list[str]:
    """Look at servers that have nothing left to do, and print it all; what was off."""
    held_count = await pair.wait_at_rest(REST_TIMEOUT_S)
    uses.sample(pair.servers)
    problems = summarize_answers(load, has_faults=settings.has_faults)
    print(f"\npages held at the end: {held_count}")
    if held_count:
        problems.append(f"{held_count} pages were not given back")
    problems += summarize_growth(uses.growths())
    for server in pair.servers:
        look = await hear(server, counters)
        print(f"{server.role} server counted: {look.counters if look else 'no answer'}")
        print(f"{server.role} server keeps: {look.prefix_cache if look else 'no answer'}")
        # What somebody still uses of a cached prefix, or of the tier, can't be forgotten.
        reason = await server.flush_cache()
        if reason:
            problems.append(f"the {server.role} server can't forget its prefixes: {reason}")
    is_long = settings.duration_s >= LONG_S
    return problems + summarize_features(load, counters, is_long=is_long)


async def hear(server: Server, counters: CounterLog) -> Look | None:
    """Look at a server and note its counters; None if it does not answer now."""
    look = await server.look()
    if look is not None and server.process is not None:
        counters.take(server.role, server.process.pid, look.counters)
    return look


@dataclass(frozen=True, slots=True)
class Watch:
    """Of a pair under load."""

    pair: ServerPair
    load: Load
    uses: UseLog
    counters: CounterLog

    async def run(self, duration_s: float, *, may_end: bool = False) -> None:
        """Sample and report until the time is over. may_end: whether servers are ended by us."""
        began_at = time.monotonic()
        sampled_at = told_at = began_at
        while time.monotonic() - began_at < duration_s:
            await asyncio.sleep(0.5)
            self.load.check()
            now = time.monotonic()
            for server in self.pair.servers:
                if not server.is_running and not may_end:
                    raise RuntimeError(f"the {server.role} server ended:\n{server.last_words()}")
            if now - sampled_at >= SAMPLE_INTERVAL_S:
                sampled_at = now
                self.uses.sample(self.pair.servers)
            if now - told_at >= PROGRESS_INTERVAL_S:
                told_at = now
                await self._tell(now - began_at)

    async def _tell(self, elapsed_s: float) -> None:
        counts = self.load.counts()
        words = " ".join(f"{verdict} {counts[verdict]}" for verdict in Verdict if counts[verdict])
        looks = [await hear(server, self.counters) for server in self.pair.servers]
        held = "+".join("?" if look is None else str(look.held_count) for look in looks)
        tiers = "+".join("?" if look is None else f"{look.tier_share:.0%}" for look in looks)
        open_count = self.load.sent_count - len(self.load.answers)
        starved = "+".join(f"{self.uses.starved_share(f'{side} worker'):.0%}" for side in Side)
        print(
            f"{elapsed_s:6.0f} s  sent {self.load.sent_count} open {open_count} {words}  "
            f"pages held {held}  tier {tiers}  rss {self.uses.total_rss_mb():.0f} MB  "
            f"workers waited for a core {starved}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
