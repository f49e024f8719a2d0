"""When staging pays, on links with known prices."""

from __future__ import annotations

import pytest

from common.planner.link_cost import CopyCost, CopyCosts, LinkCost, measured_copy, measured_cost

SLOT_NBYTES = 4 << 20
# CUDA IPC on one card: a put takes 7 us whatever its size. A slot of 4 MiB takes two index uploads,
# a copy kernel and a wait for the stream at either end, and a message and its credit: 250 us.
CARD = LinkCost(
    put_s=7e-6,
    bandwidth=100e9,
    slot_nbytes=SLOT_NBYTES,
    copies=CopyCosts(CopyCost(50e-6, 1e12), CopyCost(50e-6, 1e12)),
    round_trip_s=150e-6,
)
SHARED_MEMORY = LinkCost(
    put_s=5e-8,
    bandwidth=5e9,
    slot_nbytes=SLOT_NBYTES,
    copies=CopyCosts(CopyCost(2e-6, 5e9), CopyCost(2e-6, 5e9)),
    round_trip_s=3e-4,
)


@pytest.mark.parametrize(
    ("cost", "run_nbytes", "run_count", "is_staged"),
    [
        (CARD, 512, 100_000, True),
        (CARD, 64 << 10, 16_384, True),
        (CARD, 256 << 10, 1000, False),  # 7 ms of puts, but 63 slots
        (CARD, 2 << 20, 512, False),  # whole pages of a model of 8B
        (CARD, 16 << 20, 100, False),
        (CARD, 512, 4, False),  # a few puts are over before a slot is
        (CARD, 512, 40, True),
        (SHARED_MEMORY, 4096, 100_000, False),
        (SHARED_MEMORY, 64, 1_000_000, True),
    ],
)
def test_short_runs_are_staged_where_a_slot_of_them_costs_less_than_their_puts(
    cost: LinkCost, run_nbytes: int, run_count: int, is_staged: bool
) -> None:
    assert cost.prefers_staging(run_nbytes * run_count, run_count) is is_staged


@pytest.mark.parametrize("run_nbytes", [1 << bits for bits in range(9, 23)])
@pytest.mark.parametrize("run_count", [1, 20, 35, 40, 1000, 100_000])
def test_on_a_card_a_slot_is_weighed_against_the_puts_that_it_spares(
    run_nbytes: int, run_count: int
) -> None:
    """The two times that decide, by hand: 7 us a put, 250 us and the copies of a slot of 4 MiB."""
    nbytes = run_nbytes * run_count
    slot_count = -(-nbytes // (4 * 1024 * 1024))
    puts_us = 7 * run_count
    slots_us = 250 * slot_count + 2 * nbytes / 1e6
    assert CARD.prefers_staging(nbytes, run_count) is (slots_us < puts_us)


def test_far_from_one_slot_the_break_even_decides() -> None:
    for cost in (CARD, SHARED_MEMORY):
        for share, is_staged in ((0.9, True), (1.1, False)):
            nbytes = cost.break_even_nbytes * share
            assert cost.prefers_staging(int(nbytes * 10**7), 10**7) is is_staged


def test_smaller_slots_cost_more() -> None:
    nbytes = 64 << 20
    small = LinkCost(7e-6, 100e9, 64 << 10, CARD.copies, CARD.round_trip_s)
    assert CARD.prefers_staging(nbytes, 2000) and not small.prefers_staging(nbytes, 2000)
    assert small.break_even_nbytes < CARD.break_even_nbytes / 40


def test_a_put_costs_what_many_take_more_than_one() -> None:
    cost = measured_cost(
        slot_nbytes=1 << 20,
        one_put_s=1e-3,
        run_count=1001,
        many_puts_s=3e-3,
        copies=CopyCosts(CopyCost(2e-5, 4e9), CopyCost(3e-5, 5e9)),
        round_trip_s=2e-4,
    )
    assert cost.put_s == pytest.approx(2e-6)
    assert cost.bandwidth == pytest.approx((1 << 20) / 1e-3)
    assert str(cost) == (
        "2.00 us per put, 1.05 GB/s; slots of 1024 KiB: gather 20 us + 4.00 GB/s, "
        "scatter 30 us + 5.00 GB/s, round trip 200 us"
    )


def test_a_byte_costs_what_a_full_piece_takes_more_than_an_empty_one() -> None:
    cost = measured_copy(least_s=5e-5, nbytes=4_000_000, full_s=9e-5)
    assert cost.piece_s == 5e-5 and cost.bandwidth == pytest.approx(100e9)


def test_a_full_piece_that_seems_quicker_than_an_empty_one_costs_its_launch() -> None:
    cost = measured_copy(least_s=5e-5, nbytes=4_000_000, full_s=4e-5)
    assert cost.piece_s == 5e-5 and cost.bandwidth > 1e12


def test_a_link_on_which_puts_cost_nothing_is_never_staged() -> None:
    cost = measured_cost(
        slot_nbytes=4096,
        one_put_s=1e-4,
        run_count=4,
        many_puts_s=0.5e-4,
        copies=CopyCosts(CopyCost(0.0, 4e9), CopyCost(0.0, 4e9)),
        round_trip_s=1e-4,
    )
    assert cost.put_s == 0.0
    assert not cost.prefers_staging(1 << 30, 1 << 20)
