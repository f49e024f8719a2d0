"""Latent attention and grouped experts: the two ways of attending, routing, sizes, rank cuts."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.attention import latent
from common.engine.attention.attention import AttentionPass
from common.engine.attention.latent import (
    LatentAttention,
    LatentProjection,
    absorbing_pays,
    attend_absorbed,
    attend_absorbed_chunk,
    attend_expanded,
)
from common.engine.cache.kv_pool import KvPool, Plane, Scratch
from common.engine.config.mla import RouterConfig
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.layers.routing import choose_experts
from common.engine.loader import load_model
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.component import Shard
from common.layout.families import mla_components
from tests.engine.paged_decoding import Sequence, forward, greedy, make_pool, shuffled_pages
from tests.engine.parallel_ranks import CHUNKS, TIMEOUT_S, TOPOLOGIES, compute, run_rank
from tests.engine.recipes.latent import RECIPES as LATENT_RECIPES
from tests.engine.recipes.recipe import YARN_ROPE
from tests.engine.recipes.sparse import RECIPES as SPARSE_RECIPES
from tests.engine.tiny_checkpoints import (
    RECIPES,
    Recipe,
    Reference,
    build_checkpoint,
    random_prompt,
)

Checkpoints = Callable[[str], Path]

NAMES = [*LATENT_RECIPES, *SPARSE_RECIPES]
PAGE_SIZE = 4
# Values wider than keys here, narrower in the checkpoints.
LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM, HEAD_COUNT = 12, 4, 6, 11, 3
ROW_DIM = LATENT_DIM + ROPE_DIM


def small_pool(*, dtype: str = "float32", layer_group_count: int = 1) -> KvPool:
    """Two layers of rows. Not one byte is a finite number: nothing may rely on what pages held."""
    components = mla_components(
        layer_count=2, latent_dim=LATENT_DIM, rope_dim=ROPE_DIM, is_interleaved=True, dtype=dtype
    )
    layout = ServerLayout(components, 2, ((0, 2),), PAGE_SIZE, layer_group_count)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, 1), [24], "cpu")
    for buffer in pool.buffers:
        buffer.fill_(0xFF)
    return pool


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_projection() -> LatentProjection:
    return LatentProjection(
        key=draw(HEAD_COUNT, NOPE_DIM, LATENT_DIM, seed=1),
        value=draw(HEAD_COUNT, VALUE_DIM, LATENT_DIM, seed=2),
        scale=0.3,
    )


def attend_slowly(query: Tensor, rows: Tensor, projection: LatentProjection) -> Tensor:
    """One query token [heads, dim] over rows [items, row dim], written out head by head."""
    outputs = []
    for head in range(HEAD_COUNT):
        scores = []
        for row in rows:
            key = projection.key[head] @ row[:LATENT_DIM]
            score = query[head, :NOPE_DIM] @ key + query[head, NOPE_DIM:] @ row[LATENT_DIM:]
            scores.append(float(score) * projection.scale)
        weights = torch.tensor(scores).softmax(0)
        values = torch.stack([projection.value[head] @ row[:LATENT_DIM] for row in rows])
        outputs.append(weights @ values)
    return torch.stack(outputs)


@pytest.mark.parametrize("layer_group_count", [1, 2])
@pytest.mark.parametrize("elements_max", [1, 200, 2**24])
def test_a_pass_over_pages_equals_every_head_written_out(
    layer_group_count: int, elements_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First chunks, chunks behind a cached prefix that is longer, decodes at ends of pages; heads
    that take turns one by one, in parts, and all at once."""
    monkeypatch.setattr(latent, "EXPANDED_ELEMENTS_MAX", elements_max)
    pool = small_pool(layer_group_count=layer_group_count)
    pages = shuffled_pages(24, 3)
    lengths = [[3], [4], [5], [7, 2, 6], [1], [8, 1, 1]]
    owned = [[pages.pop() for _ in range(4)] for _ in lengths]
    history: list[list[Tensor]] = [[] for _ in lengths]
    computed = [0] * len(lengths)
    projection = make_projection()
    for step in range(3):
        active = [i for i, sizes in enumerate(lengths) if step < len(sizes)]
        sizes = [lengths[i][step] for i in active]
        chunks = [
            SequenceChunk([0] * size, computed[i], (owned[i],))
            for i, size in zip(active, sizes, strict=True)
        ]
        batch = ForwardBatch.build(chunks, groups=pool.groups, device="cpu")
        attention = LatentAttention().start(batch, pool)
        query = draw(batch.token_count, HEAD_COUNT, NOPE_DIM + ROPE_DIM, seed=10 + step)
        row = draw(batch.token_count, ROW_DIM, seed=20 + step)
        actual = attention.attend_latent(1, query, row, projection)
        first = 0
        for i, size in zip(active, sizes, strict=True):
            for token in range(first, first + size):
                history[i].append(row[token])
                expected = attend_slowly(query[token], torch.stack(history[i]), projection)
                torch.testing.assert_close(actual[token], expected, atol=2e-5, rtol=1e-4)
            computed[i] += size
            first += size


def test_absorbed_equals_expanded() -> None:
    projection = make_projection()
    rows, query = draw(9, ROW_DIM, seed=3), draw(1, HEAD_COUNT, NOPE_DIM + ROPE_DIM, seed=4)
    absorbed = attend_absorbed(query, rows[None], None, projection)
    everything = torch.ones(1, 9, dtype=torch.bool)
    expanded = attend_expanded(query, rows, everything, projection)
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [2, 7])
def test_a_chunk_absorbed_equals_expanded(count: int) -> None:
    """Causally, and where each token sees some of what is before it."""
    projection, total = make_projection(), 12
    rows, query = draw(total, ROW_DIM, seed=3), draw(count, HEAD_COUNT, NOPE_DIM + ROPE_DIM, seed=4)
    causal = torch.ones(count, total, dtype=torch.bool).tril(total - count)
    for mask in (causal, causal & (torch.arange(total) % 3 != 1)):
        absorbed = attend_absorbed_chunk(query, rows, mask, projection)
        expanded = attend_expanded(query, rows, mask, projection)
        torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


def test_absorbing_pays_for_few_tokens_alone() -> None:
    """DeepSeek-V3's sizes: 128 and 64 of a query, 128 of a value, 512 of a latent row."""
    projection = LatentProjection(torch.empty(1, 128, 512), torch.empty(1, 128, 512), 1.0)
    assert absorbing_pays(192, projection, 2) and absorbing_pays(192, projection, 128)
    assert not absorbing_pays(192, projection, 256)


def test_rows_attended_as_plain_keys_follow_the_common_contract() -> None:
    pool = small_pool()
    batch = ForwardBatch.build(
        [SequenceChunk([0] * 3, 0, ([5],))], groups=pool.groups, device="cpu"
    )
    attention: AttentionPass = LatentAttention().start(batch, pool)
    query, key = draw(3, HEAD_COUNT, ROW_DIM, seed=5), draw(3, 1, ROW_DIM, seed=6)
    actual = attention.attend(0, query, key, key[..., :LATENT_DIM])
    scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * ROW_DIM**-0.5
    scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), key[:, 0, :LATENT_DIM])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_decoding_reads_every_cached_row_once_whatever_the_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []
    gather = Plane.gather

    def count(plane: Plane, index: object, scratch: Scratch) -> Tensor:
        rows = gather(plane, index, scratch)  # type: ignore[arg-type]
        gathered.append(rows.numel() * rows.element_size())
        return rows

    monkeypatch.setattr(Plane, "gather", count)
    for head_count in (8, 32, 128):
        pool = small_pool()
        chunk = SequenceChunk([0], 4 * PAGE_SIZE - 1, ([3, 1, 4, 2],))
        batch = ForwardBatch.build([chunk], groups=pool.groups, device="cpu")
        projection = LatentProjection(
            draw(head_count, NOPE_DIM, LATENT_DIM, seed=1),
            draw(head_count, VALUE_DIM, LATENT_DIM, seed=2),
            scale=1.0,
        )
        query = draw(1, head_count, NOPE_DIM + ROPE_DIM, seed=3)
        LatentAttention().start(batch, pool).attend_latent(
            0, query, draw(1, ROW_DIM, seed=4), projection
        )
    assert gathered == [4 * PAGE_SIZE * ROW_DIM * 4] * 3


@pytest.mark.parametrize(("dtype", "element_nbytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_token_takes_one_row_per_layer(
    dtype: str, element_nbytes: int, tiny_checkpoint: Checkpoints
) -> None:
    config = load_model(tiny_checkpoint("deepseek_v3"), load_format="dummy").config
    components = cache_components(config, dtype)
    assert [component.shard for component in components] == [Shard.REPLICATE]
    for tp_size in (1, 2, 8):
        layout = ServerLayout(components, tp_size, ((0, 1), (1, 3)), 16)
        layout.check()
        for rank in layout.ranks:
            (group,) = rank.groups
            assert group.page_nbytes == 16 * len(rank.layers) * (32 + 16) * element_nbytes


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("group_count", [1, 2, 4])
def test_experts_are_chosen_as_by_exhaustive_search(is_biased: bool, group_count: int) -> None:
    expert_count, chosen_count = 16, 3
    groups_per_token = max(1, group_count // 2)
    scores = draw(50, expert_count, seed=1).sigmoid()
    bias = draw(expert_count, seed=2) * 0.3 if is_biased else None
    config = RouterConfig(is_biased, group_count, groups_per_token, 1.0)
    chosen = choose_experts(scores, bias, config, chosen_count)
    size = expert_count // group_count
    for token in range(len(scores)):
        wanted = (scores[token] if bias is None else scores[token] + bias).tolist()
        groups = [wanted[g * size : (g + 1) * size] for g in range(group_count)]
        worth = [sum(sorted(group)[-2 if is_biased else -1 :]) for group in groups]
        best = sorted(range(group_count), key=lambda g: -worth[g])[:groups_per_token]
        allowed = [e for e in range(expert_count) if e // size in best]
        expected = sorted(allowed, key=lambda e: -wanted[e])[:chosen_count]
        assert chosen[token].tolist() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_interleave": False},
        {"attention_bias": True},
        {"q_lora_rank": None},
        {"norm_topk_prob": False},
        {"rope_parameters": YARN_ROPE},
    ],
)
def test_settings_that_only_some_checkpoints_use_equal_transformers(
    changes: dict[str, object], tmp_path: Path
) -> None:
    recipe = Recipe("DeepseekV3ForCausalLM", RECIPES["deepseek_v3"].changes | changes, seed=3)  # type: ignore[operator]
    build_checkpoint(recipe, tmp_path)
    model = load_model(tmp_path)
    sequence = Sequence(random_prompt(40, 3), shuffled_pages(4, 1))
    logits = forward(model, make_pool(model, 4), [sequence.chunk(40, all_logits=True)])
    expected = Reference.load(tmp_path).logits(sequence.token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


def test_a_prefix_longer_than_a_chunk_changes_nothing(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("deepseek_v2")
    model, prompt = load_model(path), random_prompt(100, 4)
    expected = Reference.load(path).greedy(prompt, 8)
    for sizes in ([100], [10] * 10, [37, 20, 20, 20, 3], [1] * 20 + [80]):
        sequence = Sequence(prompt, shuffled_pages(8, 1))
        assert greedy(model, make_pool(model, 8), sequence, sizes, 8) == expected


@pytest.mark.parametrize("page", range(3))
def test_every_cached_page_decides_logits(page: int, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("deepseek_v3"))
    results = []
    for is_corrupt in (False, True):
        pool = make_pool(model, 8)
        sequence = Sequence([*random_prompt(48, 5), 7], shuffled_pages(8, 1))
        forward(model, pool, [sequence.chunk(48)])
        if is_corrupt:
            pool.view("latent", 1)[sequence.page_ids[page]].zero_()
        results.append(forward(model, pool, [sequence.chunk(1)]))
    assert (results[0] - results[1]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_half_precision_stays_near_float32(name: str, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint(name), dtype="bfloat16")
    sequence = Sequence(random_prompt(33, 6), shuffled_pages(8, 2))
    pool = make_pool(model, 8)
    chunks = [sequence.chunk(size, all_logits=True) for size in (20, 12, 1)]
    logits = torch.cat([forward(model, pool, [chunk]) for chunk in chunks])
    expected = Reference.load(tiny_checkpoint(name)).logits(sequence.token_ids)
    assert pool.view("latent", 0).dtype == torch.bfloat16
    # A router near a tie may send a token to another expert; the typical difference is looked at.
    assert (logits - expected).abs().median() < 0.1


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_cache_of_less_precision_than_the_model_is_used_rounded(
    tiny_checkpoint: Checkpoints, cache_dtype: str
) -> None:
    model = load_model(tiny_checkpoint("deepseek_v2"))
    results = []
    for sizes in ([33], [20, 13], [32, 1]):
        pool = make_pool(model, 8, kv_cache_dtype=cache_dtype)
        sequence = Sequence(random_prompt(33, 6), shuffled_pages(8, 2))
        for size in sizes:
            logits = forward(model, pool, [sequence.chunk(size)])
        results.append(logits)
    # A first chunk sees its own rows as the cache will hold them, so chunking changes no more than
    # the order of sums, which a later layer's rows may round the other way for.
    torch.testing.assert_close(results[0], results[1], atol=5e-4, rtol=0.0)
    torch.testing.assert_close(results[0], results[2], atol=5e-4, rtol=0.0)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    paths = [tiny_checkpoint(name) for name in NAMES]
    prompt = random_prompt(sum(CHUNKS), 4)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(rank, paths, prompt, tmp_path), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0, 0]
    for tp_size, pp_size in TOPOLOGIES:
        first, second = (
            torch.load(tmp_path / f"logits-{tp_size}-{pp_size}-{rank}.pt") for rank in range(2)
        )
        for path, from_first, from_second in zip(paths, first, second, strict=True):
            expected = compute(path, prompt, ParallelContext())
            torch.testing.assert_close(from_second, expected, atol=1e-4, rtol=0.0)
            assert (from_first is None) if pp_size == 2 else torch.equal(from_first, from_second)
