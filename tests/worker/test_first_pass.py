"""The pass before the first request: as large as passes get, where that shows a lack of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.clock import ManualClock
from common.config import Role, ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.engine.distributed import ParallelContext
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm
from common.engine.models.registry import cache_components
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.worker.first_pass import first_pass_tokens, fitting_tokens, warm_up

LIVES = (
    SLOT,
    Live(LiveKind.WINDOW, 3),
    Live(LiveKind.TAIL, 4, 4),
    Live(LiveKind.BLOCK, 3),
    Live(LiveKind.BLOCK, 128),
)
CONTEXT_LENGTH = 1024


@pytest.fixture
def model(tiny_checkpoint: Callable[[str], Path]) -> CausalLm:
    torch.set_num_threads(1)
    return load_model(tiny_checkpoint("qwen3"), dtype="float32")


def layout_of(model: CausalLm, page_size: int) -> RankLayout:
    """Page groups of every kind; the model reads and writes one of them."""
    others = tuple(
        CacheComponent(f"c{i}", (i % 2,), (Segment("head", 1, 8),), live, Shard.SPLIT, "bfloat16")
        for i, live in enumerate(LIVES)
    )
    components = (*others, *cache_components(model.config, "auto"))
    layout = ServerLayout(components, 1, ((0, model.config.layer_count),), page_size)
    layout.check()
    return layout.rank(0, 0)


def tokens_of(
    layout: RankLayout, page_counts: list[int], device: str, chunk: int, context: int
) -> int:
    config = ServerConfig(
        role=Role.DECODE, model_path="", tokenizer_path="", served_model_name="", port=1,
        page_size=layout.server.page_size, chunked_prefill_size=chunk,
    )  # fmt: skip
    return first_pass_tokens(
        config, context, layout, page_counts, torch.device(device), ParallelContext()
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("page_count", [1, 2, 40])
def test_a_first_pass_is_content_with_the_pages_that_are_there(
    model: CausalLm, page_size: int, page_count: int
) -> None:
    layout = layout_of(model, page_size)
    page_counts = [page_count] * len(layout.groups)
    pool = KvPool.allocate(layout, page_counts, "cpu")
    runner = ModelRunner(model, pool, ManualClock())
    for wanted in (page_size, 65, CONTEXT_LENGTH):
        tokens = fitting_tokens(layout, page_counts, wanted)
        assert 1 <= tokens <= max(2, wanted)
        warm_up(runner, layout, model.config.vocab_size, tokens)
        assert runner.sequence_count == 0
    assert [bool(buffer.any()) for buffer in pool.buffers] == [False] * 5 + [True]


def test_on_a_gpu_it_is_the_largest_chunk_and_a_decode(model: CausalLm) -> None:
    layout = layout_of(model, 16)
    page_counts = [40] * len(layout.groups)
    assert tokens_of(layout, page_counts, "cuda", 256, CONTEXT_LENGTH) == 257
    assert tokens_of(layout, page_counts, "cuda", 256, 100) == 100
    assert tokens_of(layout, page_counts, "cpu", 256, CONTEXT_LENGTH) == 16
    assert tokens_of(layout, [5] * len(layout.groups), "cuda", 256, CONTEXT_LENGTH) == 64


def test_two_tokens_are_computed_wherever_there_are_pages_for_them(model: CausalLm) -> None:
    layout = layout_of(model, 1)
    assert tokens_of(layout, [2] * len(layout.groups), "cpu", 256, CONTEXT_LENGTH) == 2
    assert tokens_of(layout, [1] * len(layout.groups), "cpu", 256, CONTEXT_LENGTH) == 1
