"""The load that is sent is the one that was asked for, and the same again with the same seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.serve.settings import parse_settings
from bench.serve.workload import Ask, draw_arrivals, lengths_of, make_warm_ups, make_workload
from common.errors import ConfigError

VOCAB_SIZE = 1000


def workload_of(*flags: str) -> list[Ask]:
    return make_workload(parse_settings(flags), VOCAB_SIZE)


def test_the_same_seed_is_the_same_load() -> None:
    flags = ("--num-prompts", "20", "--random-range-ratio", "0", "--request-rate", "5")
    assert workload_of(*flags) == workload_of(*flags)
    assert workload_of(*flags) != workload_of(*flags, "--seed", "2")


def test_random_lengths_stay_in_their_range() -> None:
    asks = workload_of(
        *("--num-prompts", "300", "--random-range-ratio", "0.5"),
        *("--random-input-len", "10", "--random-output-len", "4"),
    )
    assert {len(ask.prompt) for ask in asks} == set(range(5, 11))
    assert {ask.output_count for ask in asks} == {2, 3, 4}
    assert all(0 <= token < VOCAB_SIZE for ask in asks for token in ask.prompt)


def test_a_rate_without_limit_sends_all_at_once() -> None:
    assert {ask.arrival_s for ask in workload_of("--num-prompts", "7")} == {0.0}


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = draw_arrivals(20001, 50.0, 1.0, np.random.default_rng(3))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential gaps
    assert np.mean(gaps > 1 / 50) == pytest.approx(math.exp(-1), abs=0.02)


def test_burstiness_changes_the_spread_and_not_the_rate() -> None:
    gaps = np.diff(draw_arrivals(20001, 50.0, 0.25, np.random.default_rng(3)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(2 * gaps.mean(), rel=0.1)


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    asks = workload_of(
        *("--dataset-name", "shared-prefix", "--num-prompts", "12", "--gsp-num-groups", "3"),
        *("--gsp-system-prompt-len", "20", "--gsp-question-len", "8", "--gsp-output-len", "5"),
    )
    groups: dict[tuple[int, ...], list[Ask]] = {}
    for ask in asks:
        groups.setdefault(ask.prompt[:20], []).append(ask)
    assert [len(group) for group in groups.values()] == [4, 4, 4]
    assert len({ask.prompt[20:] for ask in asks}) == 12
    assert {(len(ask.prompt), ask.output_count) for ask in asks} == {(28, 5)}


def test_warm_ups_share_no_prefix_with_what_is_measured() -> None:
    settings = parse_settings(["--num-prompts", "2", "--warmup-requests", "3"])
    asks = make_workload(settings, VOCAB_SIZE)
    warm_ups = make_warm_ups(settings, lengths_of(asks), VOCAB_SIZE)
    assert [len(ask.prompt) for ask in warm_ups] == [1024] * 3
    assert not {ask.prompt[:8] for ask in asks} & {ask.prompt[:8] for ask in warm_ups}


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 12, "output_length": 2, "hash_ids": [7, 9, 4]},
        {"timestamp": 1000, "input_length": 10, "output_length": 3, "hash_ids": [7, 8, 3]},
        {"timestamp": 1500, "input_length": 6, "output_length": 1, "hash_ids": [7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    asks = workload_of(
        *("--dataset-name", "trace", "--dataset-path", str(path)),
        *("--trace-block-size", "4", "--trace-slowdown-factor", "2"),
    )
    assert [ask.arrival_s for ask in asks] == [0.0, 1.0, 4.0]
    assert [len(ask.prompt) for ask in asks] == [10, 6, 12]
    assert [ask.output_count for ask in asks] == [3, 1, 2]
    first, second, third = (ask.prompt for ask in asks)
    assert first[:4] == second[:4] == third[:4]
    assert first[4:8] != third[4:8]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dataset-name", "trace"], "needs --dataset-path"),
        (["--dataset-path", "x.csv"], "only --dataset-name trace"),
        (["--trace-format", "csv"], "--trace-format.*mooncake.*azure.*burstgpt"),
        (["--dataset-name", "sessions", "--num-prompts", "5"], "takes --num-sessions"),
        (["--num-sessions", "5"], "only --dataset-name sessions"),
        (["--max-sessions", "5"], "only --dataset-name sessions"),
        (["--think-time", "-1"], "--think-time.*-1: must be a number"),
        (["--dataset-name", "trace", "--dataset-path", "x.csv", "--request-rate", "2"], "own arr"),
        (["--backend", "openai-chat"], "needs --tokenizer"),
        (["--backend", "vllm"], "--backend"),
        (["--request-rate", "0"], "--request-rate.*0: must be a number"),
        (["--request-rate", "nan"], "--request-rate.*nan: must be a number"),
        (["--num-prompts", "1.5"], "--num-prompts.*1.5: must be an integer"),
        (["--goodput", "ttfs:5"], "--goodput.*ttft, tpot, itl, e2el"),
        (["--goodput", "ttft:fast"], "--goodput.*fast: must be a number"),
        (["--picture", "out.gif"], "--picture.*must end with"),
        (["--extra-request-body", "[1]"], "--extra-request-body.*JSON object"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles.*101"),
        (["--base-url", "127.0.0.1:30001"], "must begin with http"),
        (["--num-prompt", "5"], "--num-prompt"),
    ],
)
def test_an_unusable_flag_is_refused_by_its_name(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_settings(flags)


def test_the_key_is_shown_in_no_result() -> None:
    settings = parse_settings(["--api-key", "secret-key"])
    assert settings.api_key == "secret-key"
    assert "secret-key" not in json.dumps(settings.shown())
