"""Runs one case on a pair under load, and says what it did to the requests and the pages."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.cases import Case
from tests.faults.keeper import Keeper
from tests.faults.scenes import Settings
from tests.faults.strikes import LASTS_S, Striker
from tests.soak.clients import Answer, Load, Target
from tests.soak.golden import Golden
from tests.soak.plans import Side
from tests.soak.servers import ServerPair
from tests.soak.verdicts import SEVERITY, Verdict

# Beyond the servers' own timeout: a freeze, and what a crowded machine adds.
HANG_GRACE_S = LASTS_S[1] + 12.0
# The fault strikes at a random moment after the load has come up to speed.
WARM_ANSWER_COUNT = 8
PAUSE_MAX_S = 0.5
WARM_TIMEOUT_S = 60.0
# Healed means: this many requests and seconds of nothing but right answers.
HEALED_ANSWER_COUNT = 16
HEALED_S = 1.5
HEAL_TIMEOUT_S = 75.0
REST_TIMEOUT_S = 20.0
LOOK_INTERVAL_S = 0.1
TROUBLES = (Verdict.ERROR, Verdict.UNREACHABLE, Verdict.CUT, Verdict.HANG, Verdict.WRONG)
DETAIL_COUNT_MAX = 8


@dataclass(slots=True)
class Report:
    """What one case did. heal_s: from the end of the fault to the last request sent in vain."""

    name: str
    sent_count: int
    counts: Counter[Verdict]
    leaked_count: int
    heal_s: float
    fault_count: int
    details: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    HEAD = (
        f"{'case':<50}{'sent':>6}{'right':>7}{'abort':>6}{'error':>6}{'unrea':>6}{'cut':>5}"
        f"{'hang':>5}{'wrong':>6}{'leaked':>7}{'heal s':>8}"
    )

    @property
    def row(self) -> str:
        counts = self.counts
        return (
            f"{self.name:<50}{self.sent_count:>6}{counts[Verdict.RIGHT]:>7}"
            f"{counts[Verdict.ABORTED]:>6}{counts[Verdict.ERROR]:>6}"
            f"{counts[Verdict.UNREACHABLE]:>6}{counts[Verdict.CUT]:>5}{counts[Verdict.HANG]:>5}"
            f"{counts[Verdict.WRONG]:>6}{self.leaked_count:>7}{self.heal_s:>8.1f}"
        )


@dataclass(slots=True)
class Stage:
    """A pair, its keeper and what its clients ask; cases follow each other on it."""

    pair: ServerPair
    keeper: Keeper
    striker: Striker
    goldens: Sequence[Golden]
    settings: Settings
    _case_count: int = 0

    async def run(self, case: Case) -> Report:
        """One case, from a pair at rest to a pair at rest."""
        rng = random.Random(f"{case.name} {self.settings.seed} {self._case_count}")
        log_sizes = {s.role: s.log_path.stat().st_size for s in self.pair.servers}
        self.keeper.forget()
        hang_after_s = self.settings.request_timeout_s + HANG_GRACE_S
        target = Target(self.pair.urls, self.pair.bootstrap, hang_after_s, keeps_connections=False)
        # Each case has clients of its own: a router uses a room once.
        self._case_count += 1
        load_seed = self.settings.seed * 1000 + self._case_count
        load = Load(target, self.goldens, load_seed, self.settings.client_count)
        load.start()
        await self._warm_up(load)
        await asyncio.sleep(rng.random() * PAUSE_MAX_S)
        began_at = time.monotonic()
        await asyncio.gather(*(self.striker.strike(fault, load, rng) for fault in case.faults))
        ended_at = time.monotonic()
        is_healed = await self._wait_healed(load, ended_at)
        await load.stop()
        leaked_count = await self.pair.wait_at_rest(REST_TIMEOUT_S)
        report = Report(
            name=case.name,
            sent_count=load.sent_count,
            counts=load.counts(),
            leaked_count=leaked_count,
            heal_s=_last_trouble(load.answers, ended_at) - ended_at,
            fault_count=len(case.faults),
        )
        report.details = _details(load.answers)
        early_count = sum(
            answer.verdict in TROUBLES and answer.ended_at < began_at for answer in load.answers
        )
        report.problems = _problems(case, report, is_healed=is_healed, early_count=early_count)
        report.problems += self._find_damage(case, log_sizes)
        return report

    async def _warm_up(self, load: Load) -> None:
        end_at = time.monotonic() + WARM_TIMEOUT_S
        while load.counts()[Verdict.RIGHT] < WARM_ANSWER_COUNT and time.monotonic() < end_at:
            load.check()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _wait_healed(self, load: Load, ended_at: float) -> bool:
        """Until requests sent after the last trouble have all been right for a while."""
        while time.monotonic() < ended_at + HEAL_TIMEOUT_S:
            load.check()
            calm_since = _last_trouble(load.answers, ended_at)
            right_count = sum(
                answer.verdict is Verdict.RIGHT and answer.sent_at > calm_since
                for answer in load.answers
            )
            is_long = time.monotonic() - calm_since > HEALED_S
            if is_long and right_count >= HEALED_ANSWER_COUNT:
                return True
            await asyncio.sleep(LOOK_INTERVAL_S)
        return False

    def _find_damage(self, case: Case, log_sizes: dict[str, int]) -> list[str]:
        """What no fault excuses: servers that died by themselves, crashes, processes left."""
        problems = [f"left behind: {name}" for name in self.keeper.left_behind]
        for side in Side:
            server = self.pair.server(side)
            count, expected = self.keeper.restart_counts.get(side, 0), case.restart_count(side)
            if count != expected and not (case.starts_in_vain and count > expected > 0):
                codes = self.keeper.exit_codes.get(side, [])
                problems.append(f"{side} ended {count} times {codes}, expected {expected}")
            with server.log_path.open("rb") as log:
                log.seek(log_sizes[server.role])
                words = log.read().decode(errors="replace")
            if "Traceback" in words:
                lines = words[words.index("Traceback") :].splitlines()
                raised = next((line for line in lines[1:] if line and line[0] != " "), "?")
                problems.append(f"{side} crashed: {raised} (see {server.log_path})")
        return problems


def _last_trouble(answers: list[Answer], at_least: float) -> float:
    """When the last request was sent that came to nothing."""
    troubled = (answer.sent_at for answer in answers if answer.verdict in TROUBLES)
    return max([at_least, *troubled])


def _details(answers: list[Answer]) -> list[str]:
    """The worst first."""
    troubled = sorted(answers, key=lambda answer: -SEVERITY.index(answer.verdict))
    counts = Counter(_in_words(answer) for answer in troubled if answer.detail)
    worst = list(counts.items())[:DETAIL_COUNT_MAX]
    return [f"{count} x {words}" for words, count in worst]


def _in_words(answer: Answer) -> str:
    """What happened to a request, and what was special about it."""
    plan = answer.plan
    twisted = f", {plan.twist} on {'+'.join(plan.twisted_sides)}" if plan.twisted_sides else ""
    way = "routed" if plan.is_routed else "plain"
    duration_s = answer.ended_at - answer.sent_at
    return f"{answer.verdict}: {answer.detail} ({way}{twisted}, after {duration_s:.1f} s)"


def _problems(case: Case, report: Report, *, is_healed: bool, early_count: int) -> list[str]:
    """What must not be, whatever was done."""
    problems = [
        f"{report.counts[verdict]} x {verdict}"
        for verdict in (Verdict.HANG, Verdict.WRONG)
        if report.counts[verdict]
    ]
    if not any(fault.closes_port for fault in case.faults) and report.counts[Verdict.UNREACHABLE]:
        problems.append(f"{report.counts[Verdict.UNREACHABLE]} x unreachable, but no server ended")
    if not any(fault.cuts_connections for fault in case.faults) and report.counts[Verdict.CUT]:
        problems.append(f"{report.counts[Verdict.CUT]} x cut, but no frontend was killed")
    if report.leaked_count:
        problems.append(f"{report.leaked_count} pages leaked")
    if not is_healed:
        problems.append(f"not healed after {HEAL_TIMEOUT_S:g} s")
    if early_count:
        problems.append(f"{early_count} requests came to nothing before the fault")
    return problems
