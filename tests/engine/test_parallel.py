"""Tensor and pipeline parallel ranks as real processes over gloo, against one rank."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.errors import ConfigError
from tests.engine.parallel_ranks import (
    CHUNKS,
    PASS_TIMEOUT_S,
    TIMEOUT_S,
    TOPOLOGIES,
    compute,
    run_rank,
)
from tests.engine.tiny_checkpoints import Recipe, build_checkpoint, random_prompt

Checkpoints = Callable[[str], Path]

# Below 500, so that it lies in the smallest vocabulary.
PROMPT = [token % 500 for token in random_prompt(sum(CHUNKS), 4)]


@pytest.fixture(scope="module")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KV head and 509 rows of vocabulary: two ranks replicate the one and pad the other."""
    recipe = Recipe("LlamaForCausalLM", {"num_key_value_heads": 1, "vocab_size": 509}, seed=1)
    return build_checkpoint(recipe, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def paths(tiny_checkpoint: Checkpoints, odd_checkpoint: Path) -> list[Path]:
    names = ("llama_bias", "qwen2_tied", "qwen3_moe", "gpt_oss", "deepseek_v4")
    return [*(tiny_checkpoint(name) for name in names), odd_checkpoint]


@pytest.fixture(scope="module")
def shared(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory where two ranks have left their logits for every topology."""
    directory = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(rank, paths, PROMPT, directory), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0, 0]
    return directory


def logits_of_rank(shared: Path, topology: tuple[int, int], rank: int) -> list[Tensor | None]:
    tp_size, pp_size = topology
    logits: list[Tensor | None] = torch.load(shared / f"logits-{tp_size}-{pp_size}-{rank}.pt")
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_ranks_compute_what_one_does(
    topology: tuple[int, int], paths: list[Path], shared: Path
) -> None:
    first, second = (logits_of_rank(shared, topology, rank) for rank in range(2))
    for path, from_first, from_second in zip(paths, first, second, strict=True):
        expected = compute(path, PROMPT, ParallelContext())
        assert expected is not None and from_second is not None
        torch.testing.assert_close(from_second, expected, atol=1e-4, rtol=0.0)
        if topology == (1, 2):
            assert from_first is None, "only the last stage has logits"
        else:
            assert from_first is not None
            assert torch.equal(from_first, from_second), "both ranks must draw the same tokens"


def test_a_rank_outside_the_server_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank=2: must be in 0\.\.1"):
        ParallelContext.join(
            rank=2,
            tp_size=2,
            pp_size=1,
            backend="gloo",
            init_method="env://",
            meet_timeout_s=1.0,
            pass_timeout_s=1.0,
        )


# Both backends: NCCL by itself would miss a rank only in the first pass.
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_that_do_not_come_are_named(tmp_path: Path, backend: str) -> None:
    said = "rank 1 of 4 could not join: rank 0, 2, 3 did not come within 0.05 s"
    with pytest.raises(ConfigError, match=said):
        ParallelContext.join(
            rank=1,
            tp_size=2,
            pp_size=2,
            backend=backend,
            init_method=f"file://{tmp_path / 'meeting'}",
            meet_timeout_s=0.05,
            pass_timeout_s=60.0,
        )
    assert not torch.distributed.is_initialized()


def test_ranks_on_different_devices_end_instead_of_waiting(tmp_path: Path) -> None:
    def join(rank: int) -> None:
        ParallelContext.join(
            rank=rank,
            tp_size=2,
            pp_size=1,
            backend=("gloo", "nccl")[rank],
            init_method=f"file://{tmp_path / 'meeting'}",
            meet_timeout_s=60.0,
            pass_timeout_s=60.0,
        )

    with ThreadPoolExecutor() as threads:
        for told in [threads.submit(join, rank) for rank in range(2)]:
            with pytest.raises(ConfigError, match=r"--device: .* rank 0 gloo, rank 1 nccl"):
                told.result()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_rank_that_met_the_others_waits_for_them_as_long_as_a_pass_may(shared: Path) -> None:
    for tp_size, pp_size in TOPOLOGIES:
        for rank in range(2):
            timeouts_s = json.loads((shared / f"timeouts-{tp_size}-{pp_size}-{rank}").read_text())
            assert timeouts_s == [PASS_TIMEOUT_S] * (1 + (tp_size > 1))


def test_one_rank_needs_no_process_group() -> None:
    context = ParallelContext.join(
        rank=0,
        tp_size=1,
        pp_size=1,
        backend="gloo",
        init_method="unused",
        meet_timeout_s=1.0,
        pass_timeout_s=1.0,
    )
    assert context == ParallelContext()
    assert not torch.distributed.is_initialized()
    part = torch.ones(2, 3)
    assert context.all_reduce(part) is part and context.gather_last_dim(part) is part
    context.leave()
