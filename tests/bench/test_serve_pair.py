"""The load tool and a real pair, in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve.cli import main
from demo.__main__ import CHECKPOINT
from demo.servers import Pair

pytestmark = [pytest.mark.soak, pytest.mark.e2e]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(CHECKPOINT) as started:
        yield started


@pytest.mark.parametrize("backend", ["sglang", "openai", "openai-chat"])
def test_a_pair_answers_a_load_with_as_many_tokens_as_asked(
    pair: Pair, backend: str, tmp_path: Path
) -> None:
    result = tmp_path / "out.json"
    code = main(
        [
            *("--base-url", pair.decode.url, "--backend", backend, "--disable-tqdm"),
            *("--tokenizer", str(CHECKPOINT), "--num-prompts", "20", "--request-rate", "10"),
            *("--random-input-len", "50", "--random-output-len", "9"),
            *("--result-file", str(result), "--save-detailed"),
        ]
    )
    told = json.loads(result.read_text())
    assert (code, told["errors"]) == (0, {})
    assert [row["output_tokens"] for row in told["requests"]] == [9] * 20
    if backend != "openai-chat":
        assert [row["prompt_tokens"] for row in told["requests"]] == [50] * 20


@pytest.mark.parametrize("backend", ["sglang", "openai", "openai-chat"])
def test_sessions_go_on_with_what_a_pair_answered(pair: Pair, backend: str, tmp_path: Path) -> None:
    result = tmp_path / "out.json"
    code = main(
        [
            *("--base-url", pair.decode.url, "--backend", backend, "--disable-tqdm"),
            *("--tokenizer", str(CHECKPOINT), "--dataset-name", "sessions"),
            *("--num-sessions", "3", "--session-turns", "4", "--random-input-len", "100"),
            *("--session-turn-len", "20", "--random-output-len", "9"),
            *("--result-file", str(result)),
        ]
    )
    told = json.loads(result.read_text())
    assert (code, told["errors"], told["unsent_count"]) == (0, {}, 0)
    assert [row["request_count"] for row in told["turns"]] == [3] * 4
    if backend != "openai-chat":
        assert [row["prompt_tokens"] for row in told["turns"]] == [100, 129, 158, 187]
