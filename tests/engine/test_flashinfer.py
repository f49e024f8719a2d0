"""What FlashInfer is given: page runs against a slow oracle, and plans by kind of layer.

The kernels themselves need a GPU; `tests/gpu` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.attention.flashinfer import (
    FlashInferAttention,
    FlashInferPass,
    kinds_of_pool,
)
from common.engine.attention.flashinfer_kernels import DecodeKernel, Kernel, PrefillKernel, Shapes
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.page_runs import HostRuns, PageRuns, page_runs
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import (
    TOLERANCE,
    AttentionShape,
    check_attention,
    check_recorded,
    random_batch,
)
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import ForwardBatch, HostRows, SequenceChunk
from common.engine.loader import attention_shape, load_model
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.families import windowed_gqa_components
from tests.engine.flashinfer_by_definition import (
    Kept,
    PagedAttention,
    Rerun,
    append_paged_kv_cache,
    install,
)

CPU = torch.device("cpu")

SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6)


def pages_of(sequence: int, page_count: int) -> list[int]:
    return [1 + sequence * 100 + page for page in range(page_count)]


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.sampled_from((1, 2, 4, 16)), st.sampled_from((0, 1, 3, 4, 17)))
def test_a_run_holds_the_pages_that_are_seen_and_counts_tokens_from_the_first(
    sequences: list[tuple[int, int]], page_items: int, window: int
) -> None:
    lengths = [cached + new for cached, new in sequences]
    width = max(-(-length // page_items) for length in lengths)
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for sequence, (cached, _) in enumerate(sequences):
        pages = pages_of(sequence, -(-lengths[sequence] // page_items))
        left = max(0, cached - window + 1) // page_items if window else 0
        # Pages before the window have moved on.
        table[sequence, : len(pages)] = torch.tensor([0] * left + pages[left:])
    new_counts = [new for _, new in sequences]
    runs = page_runs(table, page_items, lengths, new_counts, window=window)
    on_host = HostRuns.of(np.array(lengths), np.array(new_counts), page_items, window)
    assert on_host.page_ids(table.numpy()).tolist() == runs.page_ids.tolist()
    for sequence, (cached, new) in enumerate(sequences):
        pages = runs.page_ids[runs.starts[sequence] : runs.starts[sequence + 1]].tolist()
        length = int(runs.lengths[sequence])
        last = int(runs.last_page_lengths[sequence])
        assert 1 <= last <= page_items and length == (len(pages) - 1) * page_items + last
        for token in range(new):
            # As a kernel masks: key + queries + window left >= keys + query, and causally.
            end = length - new + token
            seen = [k for k in range(end + 1) if not window or k + window - 1 >= end]
            found = [(pages[key // page_items], key % page_items) for key in seen]
            position = cached + token
            first = max(0, position - window + 1) if window else 0
            assert found == [
                (pages_of(sequence, width)[p // page_items], p % page_items)
                for p in range(first, position + 1)
            ]


# By definition ------------------------------------------------------------------------------------

KINDS = {
    "plain": AttentionKind(8, 2, 64),
    "window": AttentionKind(8, 2, 64, window=40),
    "softcap": AttentionKind(8, 2, 64, scale=0.2, softcap=5.0),
    "sinks": AttentionKind(8, 2, 64, window=40, has_sinks=True),
}
SHAPE = AttentionShape((), torch.float32, CPU, 16)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_planned_is_the_attention_of_the_kind(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    kind = KINDS[name]
    backend = FlashInferAttention([kind], dtype=torch.float32, device=CPU)
    assert check_attention(backend, kind, SHAPE) < TOLERANCE[torch.float32]
    # And by its kernels, not by the path for what it can't do.
    monkeypatch.setattr(PagedAttention, "run", lambda self, q, *_: torch.zeros_like(q))
    assert check_attention(backend, kind, SHAPE) > 0.1


@pytest.mark.parametrize("name", ["plain", "window"])
def test_a_cache_of_fp8_is_read_as_it_lies(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    kind, dtype = KINDS[name], torch.bfloat16
    shape = AttentionShape((kind,), dtype, CPU, 16, cache_dtype=torch.float8_e4m3fn)
    backend = FlashInferAttention([kind], dtype=dtype, device=CPU, cache_dtype=torch.float8_e4m3fn)
    assert check_attention(backend, kind, shape) < TOLERANCE[dtype]
    assert check_recorded(backend, kind, shape, Rerun) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", KINDS)
def test_a_recorded_decode_reads_what_was_planned_last(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    kind = KINDS[name]
    components = windowed_gqa_components(
        windows=(kind.window,), kv_head_count=2, head_dim=64, dtype="float32"
    )
    layout = ServerLayout(components, 1, ((0, 1),), 16)
    pool = KvPool.allocate(layout.rank(0, 0), [40], CPU)
    generator = torch.Generator().manual_seed(0)
    content = pool.buffers[0].view(torch.float32)
    content.copy_(torch.randn(content.shape, generator=generator))
    backend = FlashInferAttention([kind], dtype=torch.float32, device=CPU)
    backend.reserve((1, 2, 4), page_max=10)
    rule = ScoreRule(kind.scale, kind.softcap, torch.randn(8) if kind.has_sinks else None)
    query = torch.randn(2, 8, 64, generator=generator)
    batches = [
        random_batch(lengths, pool, CPU, window=kind.window)
        for lengths in (((1, 1), (1, 1)), ((130, 1), (47, 1)), ((20, 1), (159, 1)))
    ]
    recorded = backend.start_recorded(batches[0], pool)
    for batch in batches:
        backend.plan_recorded(HostRows.of(batch), pool)
        found = recorded.attend_shared(0, query, rule)
        expected = SdpaAttention().start(batch, pool).attend_shared(0, query, rule)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", KINDS)
def test_a_recording_is_tried_by_a_replay_of_longer_decodes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch)
    kind = KINDS[name]
    backend = FlashInferAttention([kind], dtype=torch.float32, device=CPU)
    assert check_recorded(backend, kind, SHAPE, Rerun) < TOLERANCE[torch.float32]
    # What keeps the lengths of its recording is found out.
    assert check_recorded(backend, kind, SHAPE, Kept) > 0.1


def test_a_kind_that_is_not_trusted_is_sdpas(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    backend = FlashInferAttention([KINDS["window"]], dtype=torch.float32, device=CPU)
    monkeypatch.setattr(PagedAttention, "run", lambda self, q, *_: torch.zeros_like(q))
    assert check_attention(backend, KINDS["plain"], SHAPE) == 0.0


# Arguments ----------------------------------------------------------------------------------------


class Wrapper:
    """Takes down what it is asked."""

    def __init__(self) -> None:
        self.plans: list[dict[str, object]] = []
        self.ran: list[tuple[object, ...]] = []

    def plan(self, *tensors: object, **options: object) -> None:
        self.plans.append({"tensors": tensors, **options})

    def run(self, *args: object) -> Tensor:
        self.ran.append(args)
        return torch.zeros(1)

    def reset_workspace_buffer(self, *_: object) -> None:
        raise AssertionError


RUNS = PageRuns(*(torch.tensor([n]) for n in range(4)))
SHAPES = Shapes(torch.tensor([0, 1]), 16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("kernel_type", [DecodeKernel, PrefillKernel])
def test_a_plan_says_what_the_kind_does_to_its_scores(kernel_type: type[Kernel]) -> None:
    plain, ruled = Wrapper(), Wrapper()
    kernel_type(AttentionKind(8, 2, 64), plain).plan(RUNS, SHAPES)
    kernel_type(AttentionKind(8, 2, 64, 128, 0.5, 30.0), ruled).plan(RUNS, SHAPES)
    names = ("window_left", "sm_scale", "logits_soft_cap")
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    assert tuple(plain.plans[0][name] for name in ("q_data_type", "kv_data_type")) == dtypes
    assert [plain.plans[0][name] for name in names] == [-1, 64**-0.5, 0.0]
    # A token of a window of 128 sees 127 before itself.
    assert [ruled.plans[0][name] for name in names] == [127, 0.5, 30.0]
    assert ruled.plans[0]["tensors"][-4:] == (8, 2, 64, 16)  # type: ignore[index]


def test_sinks_reach_the_kernel_in_fp32_with_the_scale() -> None:
    wrapper = Wrapper()
    kernel = PrefillKernel(AttentionKind(2, 1, 64, has_sinks=True), wrapper)
    query, planes = torch.zeros(1, 2, 64), (torch.zeros(1), torch.zeros(1))
    kernel.run(query, planes, torch.ones(2, dtype=torch.bfloat16))
    _, _, sinks, scale = wrapper.ran[0]
    assert isinstance(sinks, Tensor) and sinks.dtype == torch.float32 and scale == 64**-0.5


# Every recipe whose layers attend to keys and values: each kind is asked for as it was tried.
RECIPES = (
    *("qwen3", "mistral_window", "gemma2", "gemma3", "gemma4_e", "gpt_oss"),
    *("qwen3_next", "nemotron_h", "falcon_h1"),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_of_the_kinds_that_were_tried_at_start(
    tiny_checkpoint: Callable[[str], Path], recipe: str
) -> None:
    model = load_model(tiny_checkpoint(recipe))
    shape = attention_shape(model.config, ParallelContext(), CPU, 16)
    components = cache_components(model.config, "auto")
    layout = ServerLayout(components, 1, ((0, model.config.layer_count),), 16)
    pool = KvPool.allocate(layout.rank(0, 0), [1] * len(layout.groups), CPU)
    batch = ForwardBatch.build(
        [SequenceChunk([1, 2], 0, [[1]] * len(layout.groups), [1])], groups=pool.groups, device=CPU
    )
    asked: dict[AttentionKind, int] = {}

    def note(kind: AttentionKind, group: int) -> None:
        asked[kind] = group

    with torch.inference_mode():
        attention_pass = FlashInferPass(batch, pool, (Scratch(), Scratch()), note)
        model.compute(batch, pool, attention_pass)
    assert asked and set(asked) == set(shape.kinds)
    assert kinds_of_pool(shape.kinds, pool) == asked


def swapped(key: Tensor, value: Tensor, *places: object) -> None:
    append_paged_kv_cache(value, key, *places)  # type: ignore[arg-type]


def one_row_late(
    key: Tensor, value: Tensor, sequences: Tensor, rows: Tensor, *rest: object
) -> None:
    append_paged_kv_cache(key, value, sequences, (rows + 1) % 16, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("mistake", [swapped, one_row_late])
def test_rows_that_are_written_wrongly_are_found_out_at_start(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., None]
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(sys.modules["flashinfer.page"], "append_paged_kv_cache", mistake)
    kind = AttentionKind(4, 2, 64)
    shape = AttentionShape((kind,), torch.bfloat16, CPU, 16)
    backend = FlashInferAttention([kind], dtype=shape.dtype, device=CPU)
    assert not check_attention(backend, kind, shape) <= TOLERANCE[shape.dtype]
