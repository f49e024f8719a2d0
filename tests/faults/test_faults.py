"""A few quick faults on a real pair; `python -m tests.faults` has all of them."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.__main__ import run_all
from tests.faults.cases import CASES, TRANSPORTS, find_cases
from tests.faults.run import Report
from tests.soak.verdicts import Verdict

CLIENT_COUNT = 6
GOLDEN_COUNT = 16
SEED = 3


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Three cases, one after another on one pair."""
    names = "kill-prefill-worker,freeze-decode-scheduler,kill-decode-server"
    told = asyncio.run(run_all(find_cases(names), ("shm",), 0.0, CLIENT_COUNT, SEED, GOLDEN_COUNT))
    return {report.name.removeprefix("shm "): report for report in told}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kill-prefill-worker", "freeze-decode-scheduler", "kill-decode-server"]
)
def test_a_fault_costs_no_hang_no_wrong_token_and_no_page(
    reports: dict[str, Report], name: str
) -> None:
    report = reports[name]
    assert report.problems == []
    assert report.counts[Verdict.RIGHT] > 0


def test_case_names_are_unique_and_every_case_runs_somewhere() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(set(case.transports) <= set(TRANSPORTS) and case.transports for case in CASES)


def test_an_unknown_case_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="no-such-case: must be of kill-prefill-worker"):
        find_cases("kill-prefill-worker,no-such-case")
