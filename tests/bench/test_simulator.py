"""A simulation gives the times that can be worked out by hand, and those that theory knows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.serve.outcome import Run
from bench.serve.summary import measure
from bench.serve.workload import Ask, draw_arrivals
from bench.simulator.machine import Machine
from bench.simulator.profile import Profile
from bench.simulator.servers import Place
from bench.simulator.simulate import Plan, own_cards, simulate
from common.errors import ConfigError
from tests.bench.simulated import asks_of, at_the_same_time, profile_of, times_of

ONE_CORE = Place(0, 0)
SINGLE = own_cards(0, 1)
PAIR = own_cards(1, 1)


def tokens_of(run: Run) -> list[list[float]]:
    return times_of([outcome.arrivals for outcome in run.outcomes])


# ---- cores ---------------------------------------------------------------------------------------


def ends_of(jobs: list[tuple[float, float]], core_of: list[int] | None = None) -> list[float]:
    """When jobs of (start, work) end."""
    machine = Machine()
    ends = [0.0] * len(jobs)

    def start(index: int) -> None:
        def end() -> None:
            ends[index] = machine.now_s

        machine.work(core_of[index] if core_of else 0, jobs[index][1], end)

    for index, (start_s, _) in enumerate(jobs):
        machine.at(start_s, lambda index=index: start(index))
    machine.run()
    return ends


def test_jobs_of_a_core_share_it_evenly() -> None:
    assert ends_of([(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([2.0, 2.0])
    assert ends_of([(0.0, 3.0), (0.0, 1.0)]) == pytest.approx([4.0, 2.0])
    # Alone until 1, with one left; then two share until 3; the second has one left alone.
    assert ends_of([(0.0, 2.0), (1.0, 2.0)]) == pytest.approx([3.0, 4.0])
    assert ends_of([(0.0, 1.0), (0.0, 1.0)], [0, 1]) == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_a_shared_core_is_as_slow_as_theory_says() -> None:
    """M/G/1 with processor sharing: the mean time is E[S] / (1 - rho), whatever the jobs are."""
    rng = np.random.default_rng(5)
    arrivals = np.array(draw_arrivals(15000, 6.0, 1.0, rng))
    works = rng.choice([0.02, 0.18], size=len(arrivals))  # mean 0.1
    ends = np.array(ends_of(list(zip(arrivals.tolist(), works.tolist(), strict=True))))
    assert (ends - arrivals).mean() == pytest.approx(0.1 / (1 - 0.6), rel=0.05)


# ---- requests by hand ----------------------------------------------------------------------------


def test_a_single_server_takes_a_request_through_every_stage() -> None:
    profile = profile_of(
        frontend_s=0.001, frontend_token_s=0.0001, prefill_fixed_s=0.002, prefill_token_s=0.0005,
        prefill_pair_s=0.00001, decode_fixed_s=0.003, decode_sequence_s=0.001,
        decode_context_s=0.0001, message_s=9.0, dispatch_s=9.0, transfer_s=9.0,
    )  # fmt: skip
    run = simulate(profile, SINGLE, asks_of((2.0, 20, 3)))
    first = 2.0 + 0.001 + 0.002 + (0.002 + 0.01 + 0.002)
    second = first + 0.003 + 0.001 + 20 * 0.0001
    third = second + 0.003 + 0.001 + 21 * 0.0001
    assert tokens_of(run) == [[round(at_s, 6) for at_s in (first, second, third)]]
    assert [count for _, count in run.outcomes[0].arrivals] == [1, 2, 3]
    assert run.duration_s == run.outcomes[0].ended_s == pytest.approx(third)


def test_a_pair_adds_its_messages_and_its_transfer() -> None:
    profile = profile_of(
        frontend_s=0.001, message_s=0.01, dispatch_s=0.002, prefill_fixed_s=0.1,
        decode_fixed_s=0.005, transfer_s=0.02, token_nbytes=100.0, bandwidth=10000.0,
    )  # fmt: skip
    run = simulate(profile, PAIR, asks_of((0.0, 50, 2)))
    assert tokens_of(run) == [[0.633, 0.638]]


def test_prompts_of_a_single_server_hold_up_who_reads_and_those_of_a_pair_do_not() -> None:
    profile = profile_of(prefill_fixed_s=1.0, decode_fixed_s=0.1)
    asks = asks_of((0.0, 10, 6), (1.25, 10, 1))
    alone, paired = (tokens_of(simulate(profile, plan, asks)) for plan in (SINGLE, PAIR))
    # The prompt waits for the step that runs at 1.25, and the next step has both.
    assert alone == [[1.0, 1.1, 1.2, 1.3, 2.3, 2.4], [2.3]]
    assert paired == [[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.25]]


def test_prompts_are_computed_in_chunks_first_come_first_served() -> None:
    profile = profile_of(prefill_fixed_s=1.0, prefill_token_s=0.001, chunk_token_max=1000)
    run = simulate(profile, PAIR, asks_of((0.0, 1500, 1), (0.0, 700, 1)))
    # 1000 of the first; 500 of it and 500 of the second; 200 of that.
    assert tokens_of(run) == [[4.0], [5.2]]


def test_chunks_leave_room_for_who_decodes() -> None:
    profile = profile_of(prefill_token_s=1.0, decode_fixed_s=0.5, chunk_token_max=3)
    run = simulate(profile, SINGLE, asks_of((0.0, 3, 4), (3.0, 4, 1)))
    # The first decodes for 0.5 s, then beside chunks of 2 tokens.
    assert tokens_of(run)[0] == [3.0, 3.5, 6.0, 8.5]


def test_a_request_waits_for_pages_until_one_has_ended() -> None:
    profile = profile_of(prefill_fixed_s=1.0, decode_fixed_s=0.25)
    small = profile_of(prefill_fixed_s=1.0, decode_fixed_s=0.25, token_capacity=20)
    asks = at_the_same_time(3, prompt=8, output=2)
    # The first prompt is in a step before the others come, who share the next one if both may; so
    # is the second stream, which is transferred before the third.
    assert tokens_of(simulate(profile, PAIR, asks)) == [[1.0, 1.25], [2.0, 2.25], [2.0, 2.5]]
    assert tokens_of(simulate(small, PAIR, asks)) == [[1.0, 1.25], [2.0, 2.25], [3.0, 3.25]]


def test_no_more_run_together_than_may() -> None:
    profile = profile_of(prefill_fixed_s=1.0, running_max=1)
    run = simulate(profile, SINGLE, at_the_same_time(2, prompt=8, output=1))
    assert tokens_of(run) == [[1.0], [2.0]]


def test_prompts_go_to_the_prefill_server_with_the_fewest_tokens() -> None:
    profile = profile_of(prefill_token_s=0.01, chunk_token_max=10)
    asks = asks_of((0.0, 90, 1), (0.0, 20, 1), (0.0, 20, 1))
    assert tokens_of(simulate(profile, own_cards(2, 1), asks)) == [[0.9], [0.2], [0.4]]


def test_servers_on_one_core_are_no_faster_than_one() -> None:
    profile = profile_of(prefill_token_s=0.01, chunk_token_max=10)
    shared = Plan((ONE_CORE, ONE_CORE), (Place(1, 1),))
    asks = at_the_same_time(2, prompt=10, output=1)
    assert tokens_of(simulate(profile, shared, asks)) == [[0.2], [0.2]]
    assert tokens_of(simulate(profile, own_cards(2, 1), asks)) == [[0.1], [0.1]]


def test_the_client_takes_time_of_the_core_it_lives_on() -> None:
    profile = profile_of(prefill_fixed_s=1.0, client_token_s=0.25)
    asks = asks_of((0.0, 10, 1), (1.0, 10, 1))
    elsewhere = Plan((ONE_CORE,), (Place(1, 1),))
    beside = Plan((ONE_CORE,), (Place(1, 1),), client=0)
    assert tokens_of(simulate(profile, elsewhere, asks)) == [[1.0], [2.0]]
    assert tokens_of(simulate(profile, beside, asks)) == [[1.0], [2.25]]


def test_a_request_that_fits_nowhere_is_refused_by_its_number() -> None:
    with pytest.raises(ConfigError, match=r"request 1: 90 \+ 20 tokens: must be at most 100"):
        simulate(profile_of(token_capacity=100), PAIR, asks_of((0.0, 5, 5), (0.0, 90, 20)))


# ---- theory --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prefill_server_queues_as_theory_says() -> None:
    """M/D/1: one prompt a step, all alike; the mean wait is rho * D / (2 * (1 - rho))."""
    step_s, length, load = 0.05, 4, 0.7
    profile = profile_of(prefill_fixed_s=step_s, chunk_token_max=length)
    arrivals = draw_arrivals(12000, load / step_s, 1.0, np.random.default_rng(3))
    asks = [Ask(i, at_s, (0,) * length, 1) for i, at_s in enumerate(arrivals)]
    ttfts = [measure(outcome).ttft / 1e3 for outcome in simulate(profile, PAIR, asks).outcomes]
    waits = np.array(ttfts) - step_s
    assert waits.min() == pytest.approx(0.0, abs=1e-9)
    assert waits.mean() == pytest.approx(load * step_s / (2 * (1 - load)), rel=0.06)


costs = st.floats(0.0, 0.1)
profiles = st.builds(
    profile_of,
    prefill_fixed_s=costs, prefill_token_s=costs, decode_fixed_s=costs, decode_sequence_s=costs,
    frontend_s=costs, dispatch_s=costs, message_s=costs, transfer_s=costs,
    chunk_token_max=st.integers(1, 40), running_max=st.integers(1, 5),
    token_capacity=st.integers(60, 200),
)  # fmt: skip
workloads = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12
).map(lambda requests: asks_of(*sorted(requests)))
plans = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda counts: own_cards(*counts))


@settings(max_examples=60, deadline=None)
@given(profiles, plans, workloads)
def test_every_request_gets_every_token_in_order(
    profile: Profile, plan: Plan, asks: list[Ask]
) -> None:
    for outcome in simulate(profile, plan, asks).outcomes:
        times = [at_s for at_s, _ in outcome.arrivals]
        assert [count for _, count in outcome.arrivals] == [*range(1, outcome.ask.output_count + 1)]
        assert times == sorted(times) and times[0] >= outcome.ask.arrival_s
        assert outcome.ended_s == times[-1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6))
def test_prompts_of_one_moment_are_dealt_out_evenly(prompt_count: int, server_count: int) -> None:
    profile = profile_of(prefill_fixed_s=0.1, chunk_token_max=5)
    asks = at_the_same_time(prompt_count, prompt=5, output=1)
    run = simulate(profile, own_cards(server_count, 1), asks)
    assert run.duration_s == pytest.approx(0.1 * -(-prompt_count // server_count))


@settings(max_examples=40, deadline=None)
@given(workloads, st.floats(0.001, 0.1), st.floats(1.0, 5.0))
def test_no_token_of_a_lone_stream_comes_earlier_where_steps_cost_more(
    asks: list[Ask], step_s: float, factor: float
) -> None:
    for ask in asks:
        quick, slow = (
            tokens_of(simulate(profile_of(prefill_fixed_s=s, decode_fixed_s=s), PAIR, [ask]))[0]
            for s in (step_s, step_s * factor)
        )
        assert all(a <= b + 1e-6 for a, b in zip(quick, slow, strict=True))
