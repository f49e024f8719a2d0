"""When staging pays, on links with known prices."""

from __future__ import annotations

import pytest

from common.planner.link_cost import LinkCost, measured_cost

SLOW_PUTS = LinkCost(put_s=7e-6, bandwidth=100e9, copy_bandwidth=1e12, round_trip_s=1e-4)
SHARED_MEMORY = LinkCost(put_s=5e-8, bandwidth=5e9, copy_bandwidth=5e9, round_trip_s=3e-4)


@pytest.mark.parametrize(
    ("cost", "run_nbytes", "run_count", "is_staged"),
    [
        (SLOW_PUTS, 512, 100_000, True),
        (SLOW_PUTS, 256 << 10, 1000, True),
        (SLOW_PUTS, 16 << 20, 100, False),  # long runs cost nothing to speak of
        (SLOW_PUTS, 512, 4, False),  # a few puts are over before a round trip is
        (SHARED_MEMORY, 4096, 100_000, False),
        (SHARED_MEMORY, 64, 1_000_000, True),
    ],
)
def test_many_short_runs_are_staged_where_a_put_is_dear(
    cost: LinkCost, run_nbytes: int, run_count: int, is_staged: bool
) -> None:
    nbytes = run_nbytes * run_count
    assert cost.prefers_staging(nbytes, run_count) is is_staged
    assert is_staged == (cost.staged_s(nbytes) < cost.direct_s(nbytes, run_count))


def test_far_from_the_round_trip_the_break_even_decides() -> None:
    for cost in (SLOW_PUTS, SHARED_MEMORY):
        for share, is_staged in ((0.9, True), (1.1, False)):
            nbytes = cost.break_even_nbytes * share
            assert cost.prefers_staging(int(nbytes * 10**7), 10**7) is is_staged


def test_a_put_costs_what_many_take_more_than_one() -> None:
    cost = measured_cost(
        nbytes=1 << 20,
        one_put_s=1e-3,
        run_count=1001,
        many_puts_s=3e-3,
        copy_bandwidth=4e9,
        round_trip_s=2e-4,
    )
    assert cost.put_s == pytest.approx(2e-6)
    assert cost.bandwidth == pytest.approx((1 << 20) / 1e-3)
    assert str(cost) == "2.00 us per put, 1.05 GB/s, copies at 4.00 GB/s, round trip 200 us"


def test_a_link_on_which_puts_cost_nothing_is_never_staged() -> None:
    cost = measured_cost(
        nbytes=4096,
        one_put_s=1e-4,
        run_count=4,
        many_puts_s=0.5e-4,
        copy_bandwidth=4e9,
        round_trip_s=1e-4,
    )
    assert cost.put_s == 0.0
    assert not cost.prefers_staging(1 << 30, 1 << 20)
