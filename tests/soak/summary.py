"""What came of a soak, in tables, and what was off. Knows nothing of sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.soak.clients import Answer, Load
from tests.soak.features import CounterLog, Feature
from tests.soak.growth import Growth
from tests.soak.verdicts import Verdict

# Of greedy requests that we do not cut: fewer right ones are a failure, however typed the errors.
RIGHT_SHARE_MIN = 0.99
SHOWN_COUNT_MAX = 20
DETAIL_LENGTH_MAX = 400


def summarize_answers(load: Load, *, has_faults: bool) -> list[str]:
    """Print how many requests ended how; what is off."""
    counts = load.counts()
    _print_verdicts(load.answers)
    details = Counter(
        f"{answer.verdict}: {answer.detail}" for answer in load.answers if answer.detail
    )
    for detail, count in details.most_common(SHOWN_COUNT_MAX):
        print(f"  {count:>5} x {detail[:DETAIL_LENGTH_MAX]}")
    problems: list[str] = []
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
    return problems


def _print_verdicts(answers: Sequence[Answer]) -> None:
    """A row per verdict, and how long the slowest right answer took, in seconds. A request may be
    of several columns."""
    columns = {
        "all": answers,
        "routed": [one for one in answers if one.plan.is_routed],
        "n > 1": [one for one in answers if one.plan.sample_count > 1],
        "next turn": [one for one in answers if one.plan.is_turn],
    }
    print(f"\n{'requests':<14}" + "".join(f"{name:>10}" for name in columns))
    print(f"  {'answered':<12}" + "".join(f"{len(column):>10}" for column in columns.values()))
    counted = [Counter(one.verdict for one in column) for column in columns.values()]
    for verdict in Verdict:
        print(f"  {verdict:<12}" + "".join(f"{counts[verdict]:>10}" for counts in counted))
    slowest = [max(map(_right_s, column), default=0.0) for column in columns.values()]
    print(f"  {'slowest':<12}" + "".join(f"{duration_s:>10.1f}" for duration_s in slowest))


def _right_s(answer: Answer) -> float:
    """How long a right answer took, in seconds; 0 for others, which may wait for a lost half."""
    return answer.ended_at - answer.sent_at if answer.verdict is Verdict.RIGHT else 0.0


def summarize_features(load: Load, counters: CounterLog, *, is_long: bool) -> list[str]:
    """Print what shows that the features were used; what was not used, if the run was long."""
    several = [one for one in load.answers if one.plan.sample_count > 1]
    right = [one for one in several if one.verdict is Verdict.RIGHT]
    asked_count = sum(one.plan.sample_count for one in several)
    right_count = sum(one.plan.sample_count for one in right)
    print("\ncounters of the features")
    print(f"  {'clients':<8}{'samples asked':<20}{asked_count:>10}")
    print(f"  {'clients':<8}{'samples all right':<20}{right_count:>10}")
    for row in counters.rows():
        print(f"  {row}")
    unused = counters.unused()
    if Feature.SAMPLES in counters.features and not right_count:
        unused.append("samples all right")
    return [f"{name} is zero: the feature was not used" for name in unused] if is_long else []


def summarize_growth(growths: Sequence[Growth]) -> list[str]:
    """Print what each process holds; what has grown."""
    print(f"\n{'process':<22}{Growth.HEAD}")
    for one in growths:
        print(f"{one.process:<22}{one.row}")
    return [one.problem for one in growths if one.problem]
