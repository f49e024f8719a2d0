"""Operations that are counted by formula are those of the model's own tensors, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.flops import count_flops
from common.engine.loader import load_model, read_served_config
from common.engine.models.causal_lm import CausalLm
from tests.gpu.engine_section import Engine
from tests.gpu.model_shapes import LLAMA_8B, TINY, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLm:
    path = write_model(tmp_path_factory.mktemp("tiny"), TINY)
    return load_model(path, load_format="dummy")


def slow_count(model: CausalLm, start: int, stop: int) -> int:
    """Every matrix that a token is multiplied with, and every earlier token that it looks at."""
    config = model.config
    count = 0
    shapes = {piece.name: piece.shape for weight in model.weights() for piece in weight.ways[0]}
    for token in range(start, stop):
        for name, shape in shapes.items():
            if len(shape) == 2 and name.startswith("model.layers."):
                count += 2 * shape[0] * shape[1]
        for _ in range(token + 1):
            # A score and a weighted value, for every head of every layer.
            count += config.layer_count * config.head_count * 2 * (2 * config.head_dim)
    rows, columns = shapes["lm_head.weight"]
    return count + 2 * rows * columns


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 37), (20, 37), (36, 37)])
def test_the_formula_counts_what_counting_one_by_one_does(
    model: CausalLm, start: int, stop: int
) -> None:
    assert count_flops(model.config, start, stop) == slow_count(model, start, stop)


@pytest.mark.slow
def test_the_engine_multiplies_as_much_as_is_counted(tmp_path: Path) -> None:
    """torch counts the matrix products that really run; attention, which it sees whole and not
    causal, is left out of both."""
    engine = Engine(write_model(tmp_path, TINY), torch.device("cpu"), TINY.engine)
    with FlopCounterMode(display=False) as counter:
        engine.prefill_once(64, 64)
    products = sum(
        count
        for operation, count in counter.get_flop_counts()["Global"].items()
        if operation in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    query_size = engine.config.head_count * engine.config.head_dim
    attention = 2 * 2 * query_size * engine.config.layer_count * (64 * 65 // 2)
    assert products == count_flops(engine.config, 0, 64) - attention


def test_a_token_of_the_8b_shape_costs_two_operations_for_each_weight(tmp_path: Path) -> None:
    config = read_served_config(write_model(tmp_path, LLAMA_8B))
    # 8.03e9 weights, of which the embedding's are looked up, not multiplied.
    weights = 8_030_261_248 - 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    attention = 2 * 2 * 4096 * 32
    assert count_flops(config, 0, 1) == 2 * (weights - norms) + attention
