"""What is told about goodput and about counts of servers follows from the simulation alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import goodput
from bench.goodput import SHAPES, plan_of, predict, workload, write_measured
from bench.serve.outcome import Run
from bench.simulator.__main__ import main
from bench.simulator.calibrate import step_sample
from bench.simulator.comparison import Measured, Probe, goodput_of, relative_error
from bench.simulator.fit import fit_costs
from bench.simulator.profile import read_profile, write_profile
from bench.simulator.servers import Place
from bench.simulator.simulate import own_cards, simulate
from bench.simulator.sizing import Sizing, fewest
from bench.slo import Slo, find_goodput
from tests.bench.simulated import asks_of, profile_of

# A prompt is a step of its own and takes 0.1 s; a token takes 10 ms and 10 ms for each stream.
COSTLY = profile_of(
    prefill_fixed_s=0.1, chunk_token_max=8, decode_fixed_s=0.01, decode_sequence_s=0.01
)
STEADY = asks_of(*[(index / 25, 8, 5) for index in range(100)])  # 25 per second


# ---- promises ------------------------------------------------------------------------------------


def run_of(profile_s: float, output_count: int = 3) -> Run:
    profile = profile_of(prefill_fixed_s=profile_s, decode_fixed_s=0.02)
    return simulate(profile, own_cards(1, 1), asks_of((0.0, 4, output_count), (9.0, 4, 3)))


def test_a_promise_is_kept_up_to_its_limits() -> None:
    run = run_of(0.1)
    assert Slo(ttft_ms=100.001, itl_ms=20.001).is_kept(run)
    assert not Slo(ttft_ms=99.9, itl_ms=20.001).is_kept(run)
    assert not Slo(ttft_ms=100.001, itl_ms=19.9).is_kept(run)


def test_a_request_that_failed_breaks_every_promise() -> None:
    run = run_of(0.1)
    run.outcomes[0].error_kind = "timeout"
    assert not Slo(ttft_ms=1e9, itl_ms=1e9).is_kept(run)


@given(st.floats(1.1, 99.0), st.integers(1, 12))
def test_goodput_is_found_to_the_factor_of_its_steps(limit: float, steps: int) -> None:
    tried: list[float] = []

    def is_kept(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = find_goodput(is_kept, 1.0, 100.0, steps)
    factor = 100 ** (1 / 2**steps)
    assert len(tried) == steps
    assert found == max([rate for rate in tried if rate <= limit], default=0.0)
    assert found == 0.0 or found <= limit <= found * factor * 1.000001


# ---- counts --------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 60))
def test_the_fewest_are_found(enough: int, most: int) -> None:
    assert fewest(lambda n: n >= enough, most) == (enough if enough <= most else None)


@pytest.mark.slow
def test_no_smaller_count_would_have_done() -> None:
    slo = Slo(ttft_ms=250, itl_ms=40)
    answer = Sizing(COSTLY, STEADY, slo, 16).answer()
    assert answer.pairs is not None and answer.singles is not None
    kept = {
        (prefills, decodes)
        for prefills in range(5)
        for decodes in range(1, 9)
        if slo.is_kept(simulate(COSTLY, own_cards(prefills, decodes), STEADY))
    }
    pairs = {counts for counts in kept if counts[0]}
    assert answer.pairs.server_count == min(map(sum, pairs))
    assert (answer.pairs.prefill_count, answer.pairs.decode_count) in pairs
    # 25 prompts of 0.1 s are work for more than two.
    assert answer.pairs.prefill_count == 3
    assert [answer.singles.decode_count] == [
        min((decodes for prefills, decodes in kept if not prefills), default=0)
    ]


def test_nothing_is_enough_where_a_lone_prompt_takes_longer() -> None:
    answer = Sizing(COSTLY, STEADY, Slo(ttft_ms=99, itl_ms=1000), 8).answer()
    assert answer.pairs is None and answer.singles is None
    assert answer.best_pairs.ttft_ms == pytest.approx(100, abs=1)


def test_single_servers_alone_may_not_be_enough() -> None:
    """A prompt holds up every gap of a single server that has others running."""
    answer = Sizing(COSTLY, STEADY, Slo(ttft_ms=300, itl_ms=60), 3).answer()
    assert answer.pairs is not None and answer.singles is None


# ---- from samples to costs -----------------------------------------------------------------------


def test_costs_are_found_again() -> None:
    lengths = np.array([64.0, 256.0, 512.0, 1024.0])
    factors = np.stack([np.ones(4), lengths, lengths**2 / 2], axis=1)
    assert fit_costs(factors, factors @ [0.005, 2e-5, 3e-8]) == pytest.approx([0.005, 2e-5, 3e-8])


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4))
def test_no_cost_is_below_nothing(costs_s: list[float]) -> None:
    factors = np.array([(1.0, n, n * n) for n in (1.0, 2.0, 4.0, 8.0)])
    found = fit_costs(factors, np.array(costs_s))
    assert min(found) >= 0 and max(found) > 0


def test_only_the_time_when_all_streams_ran_is_a_sample() -> None:
    early = [(0.1 * index, index + 1) for index in range(100)]  # alone until 4.95 s
    late = [(4.95 + 0.2 * index, index + 1) for index in range(100)]
    sample = step_sample([early, late], 10, 0.0)
    assert sample is None  # 25 steps of the late one until 9.9 s are too few
    sample = step_sample([early, [(at_s - 2.0, count) for at_s, count in late]], 10, 0.5)
    assert sample is not None and sample.step_s == pytest.approx((0.1 + 0.2) / 2)
    assert sample.context_count == pytest.approx(10 + (31 + 100) / 2 + 10 + (1 + 35) / 2, abs=1)
    assert (sample.stream_count, sample.client_token_s) == (2, 0.5)


# ---- the sweep -----------------------------------------------------------------------------------


def test_a_sweep_sends_at_the_rate_that_it_names() -> None:
    slow, fast = workload(5.0), workload(10.0)
    assert len(slow) * 2 == len(fast)
    rates = [len(asks) / asks[-1].arrival_s for asks in (slow, fast)]
    assert rates == pytest.approx([5, 10], rel=0.35)


def test_shapes_live_where_their_servers_are_pinned() -> None:
    plans = {shape.name: plan_of(shape) for shape in SHAPES}
    front, back = Place(0, 0), Place(1, 1)
    assert {name: (plan.prefills, plan.decodes) for name, plan in plans.items()} == {
        "single": ((), (back,)),
        "1p1d": ((front,), (back,)),
        "2p1d": ((front, front), (back,)),
        "1p2d": ((front,), (back, back)),
    }


def test_a_prediction_is_a_sweep_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "HALVING_COUNT", 2)
    predicted = predict(profile_of(prefill_fixed_s=0.2, decode_fixed_s=0.01, chunk_token_max=512))
    assert list(predicted.shapes) == [shape.name for shape in SHAPES]
    assert all(len(probes) == 2 for probes in predicted.probes.values())
    assert predicted.shapes["1p1d"] < 5  # a prompt takes 0.2 s or more


def test_errors_are_shares_of_what_was_measured() -> None:
    assert relative_error(8.0, 10.0) == pytest.approx(0.2)
    assert relative_error(12.0, 10.0) == pytest.approx(0.2)
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) == float("inf")


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(COSTLY, path)
    assert read_profile(path) == COSTLY
    return path


def test_a_rate_is_answered(profile_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "25", "--input-len", "8", "--output-len", "5", "--requests", "60"]
    code = main(["size", "--profile", str(profile_path), *flags, "--ttft", "400", "--itl", "60"])
    assert code == 0
    assert "prefill and decode servers: 3 prefill, " in capsys.readouterr().out


def test_a_trace_that_no_count_can_serve_is_said_to_be_one(
    profile_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_length,output_length\n0,8,2\n1000,8,2\n")
    flags = ["--trace", str(trace), "--ttft", "50", "--itl", "60", "--max-servers", "4"]
    assert main(["size", "--profile", str(profile_path), *flags]) == 1
    said = capsys.readouterr().out
    assert said.count("up to 4 of a kind are not enough; TTFT p90 100 ms (at most 50)") == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        ("{", "must be a profile"),
        ('{"source": "x"}', "must be a profile"),
        ("negative", "below its least"),
    ],
)
def test_an_unusable_profile_is_refused(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    if content == "negative":
        write_profile(profile_of(prefill_fixed_s=-1.0), path)
    elif content is not None:
        path.write_text(content)
    flags = ["--rate", "1", "--ttft", "1", "--itl", "1"]
    assert main(["size", "--profile", str(path), *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "0", "--ttft", "1", "--itl", "1"], "--request-rate"),
        (["--rate", "1", "--input-len", "0", "--ttft", "1", "--itl", "1"], "--random-input-len"),
        (["--rate", "1", "--ttft", "0", "--itl", "1"], "--ttft"),
        (["--rate", "1", "--ttft", "1", "--itl", "1", "--percentile", "100"], "--percentile"),
        (["--rate", "1", "--ttft", "1", "--itl", "1", "--max-servers", "0"], "--max-servers"),
    ],
)
def test_an_unusable_question_is_refused(
    profile_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", "--profile", str(profile_path), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_comparison_shows_the_error_of_each_shape(
    profile_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goodput, "HALVING_COUNT", 1)
    probes = [Probe(5.0, 100.0, 20.0, True), Probe(10.0, 900.0, 20.0, False)]
    assert goodput_of(probes) == 5.0
    path = tmp_path / "measured.json"
    monkeypatch.setattr(goodput, "RESULT_PATH", path)
    assert main(["compare", "--profile", str(profile_path)]) == 2
    assert "measured.json: can't be read" in capsys.readouterr().err
    write_measured(Measured({"1p1d": goodput_of(probes)}, {"1p1d": probes}))
    assert main(["compare", "--profile", str(profile_path)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1p1d"))
    assert row.split()[1] == "5.00" and "%" in row
    path.write_text(json.dumps({"shapes": 1}))
    assert main(["compare", "--profile", str(profile_path)]) == 2
    assert "must be what `python -m bench goodput` wrote" in capsys.readouterr().err
