"""A rank that takes on other weights: as if it had begun with them, or as if nobody had asked."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.clock import ManualClock
from common.protocol.weights import LoadWeights, WeightsLoaded
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step
from common.weights import ServedWeights
from common.worker import start as start_module
from common.worker import weights as weights_module
from common.worker.start import StartedRank, start_rank
from tests.engine.tiny_checkpoints import RECIPES, build_checkpoint, random_prompt
from tests.worker.test_start import config_of
from tests.worker.test_worker_processes import GREEDY

PROMPT = random_prompt(20, 3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same config with other weights."""
    recipe = RECIPES["qwen3"]
    return build_checkpoint(replace(recipe, seed=recipe.seed + 1), tmp_path_factory.mktemp("other"))


def start(path: Path, dtype: str = "bfloat16") -> StartedRank:
    torch.set_num_threads(1)
    return start_rank(config_of(path, dtype=dtype, transport="stream"), 0, ManualClock())


@pytest.fixture
def rank(checkpoint: Path) -> Iterator[StartedRank]:
    started = start(checkpoint)
    yield started
    started.transport.close()


def greedy(rank: StartedRank, count: int = 8) -> list[int]:
    """Of one prompt, computed alone."""
    step = Step(
        1,
        [NewSequence(7, PROMPT, len(PROMPT), GREEDY)],
        [PageGrant(7, 0, 0, [1, 2])],
        [PrefillChunk(7, 0, len(PROMPT), is_last=True)],
    )
    tokens = rank.runner.run(step).token_ids
    for number in range(2, count + 1):
        tokens += rank.runner.run(Step(number, decode=[7])).token_ids
    rank.runner.forget_all()
    return tokens


def load(rank: StartedRank, path: Path, version: str = "v2", load_id: str = "x") -> WeightsLoaded:
    asked = LoadWeights(ServedWeights(str(path), version=version, load_id=load_id))
    rank.weights.want(asked)
    return rank.weights.run(asked)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_computes_as_a_rank_that_began_with_them(
    checkpoint: Path, other: Path, dtype: str
) -> None:
    """In bfloat16 with weights that are packed, and rows that were given up."""
    rank, fresh = start(checkpoint, dtype), start(other, dtype)
    before, expected = greedy(rank), greedy(fresh)
    assert load(rank, other) == WeightsLoaded(0, "x")
    assert greedy(rank) == before, "as long as no scheduler has said so"
    ready = rank.weights.use("x")
    assert greedy(rank) == expected != before
    assert ready is not None and ready.weights == ServedWeights(str(other), "auto", "v2", "x")
    named = {"weight_version": "v2"}
    assert ready.fingerprint == fresh.ready.fingerprint | named != rank.ready.fingerprint | named
    assert ready.describe["weights"] == rank.ready.describe["weights"]
    for one in (rank, fresh):
        one.transport.close()


def test_the_ones_before_are_freed(
    checkpoint: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is logged for want of a tokenizer is kept by pytest, with the frames that it came from.
    monkeypatch.setattr(start_module, "_grammars", lambda *_: None)
    rank = start(checkpoint)
    model = weakref.ref(rank.runner._model)
    load(rank, other)
    rank.weights.use("x")
    assert model() is None
    rank.transport.close()


@pytest.mark.parametrize("is_dropped_first", [False, True])
def test_what_nobody_wants_any_more_is_not_kept(
    rank: StartedRank, other: Path, *, is_dropped_first: bool
) -> None:
    """Of a scheduler that has ended, or where another rank has failed; it may still be loading."""
    before = greedy(rank)
    asked = LoadWeights(ServedWeights(str(other), load_id="x"))
    rank.weights.want(asked)
    if is_dropped_first:
        rank.weights.drop()
    rank.weights.run(asked)
    assert (rank.weights._loaded is None) is is_dropped_first
    assert rank.weights.use("") is None
    assert rank.weights._loaded is None and greedy(rank) == before


def test_another_name_changes_no_weight_and_forgets_no_path(rank: StartedRank, other: Path) -> None:
    load(rank, other)
    rank.weights.use("x")
    tokens, model = greedy(rank), rank.runner._model
    asked = LoadWeights(ServedWeights(version="v3", load_id="y"))
    rank.weights.want(asked)
    rank.weights.run(asked)
    ready = rank.weights.use("y")
    assert ready is not None and ready.weights == ServedWeights(str(other), "auto", "v3", "y")
    assert ready.fingerprint["weight_version"] == "v3"
    assert rank.runner._model is model and greedy(rank) == tokens


def test_a_fingerprint_names_no_version_that_was_not_given(rank: StartedRank) -> None:
    """Else servers of earlier releases would be refused."""
    assert "weight_version" not in rank.ready.fingerprint
    assert rank.ready.weights.version == "default"


def test_a_checkpoint_of_another_config_is_refused_by_field(
    rank: StartedRank, other: Path, tmp_path: Path
) -> None:
    settings = json.loads((other / "config.json").read_text())
    settings |= {"rms_norm_eps": 0.5, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    problem = load(rank, tmp_path).error
    assert "rms_norm_eps=0.5, served 1e-05" in problem
    assert "context_length=64, served 1024" in problem


def test_a_checkpoint_that_memory_is_short_for_is_refused_before_it_is_read(
    rank: StartedRank, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "free_nbytes", lambda device: 1000)
    assert "no memory for other weights beside those that are served" in load(rank, other).error


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(rank: StartedRank, other: Path, tmp_path: Path, name: str) -> None:
    before = greedy(rank)
    for kept in {"model.safetensors", "config.json"} - {name}:
        (tmp_path / kept).write_bytes((other / kept).read_bytes())
    assert name in load(rank, tmp_path).error
    assert greedy(rank) == before
