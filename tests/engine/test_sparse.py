"""Attention to chosen tokens: the choice, its borders, and what of the cache it reads and needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.attention import sparse
from common.engine.attention.best_keys import KeyChoice, best_keys
from common.engine.attention.latent import LatentAttention, LatentProjection
from common.engine.attention.sparse import INDEX_KEY, select
from common.engine.cache.kv_pool import KvPool, Plane
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.loader import load_model
from common.layout.cache_layout import ServerLayout
from common.layout.families import sparse_mla_components
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.recipes.sparse import TOKEN_COUNT
from tests.engine.tiny_checkpoints import (
    RECIPES,
    Recipe,
    Reference,
    build_checkpoint,
    random_prompt,
)

Checkpoints = Callable[[str], Path]

NAMES = ("deepseek_v32", "glm_dsa")
PAGE_SIZE = 4
LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM, HEAD_COUNT = 12, 4, 6, 11, 3
INDEX_HEADS, INDEX_DIM = 2, 5
COUNT = 6


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_pool() -> KvPool:
    """Two layers, both with index keys. Not one byte is a finite number."""
    components = sparse_mla_components(
        layer_count=2,
        latent_dim=LATENT_DIM,
        rope_dim=ROPE_DIM,
        is_interleaved=True,
        index_layers=(0, 1),
        index_dim=INDEX_DIM,
        is_index_interleaved=False,
        dtype="float32",
    )
    layout = ServerLayout(components, 1, ((0, 2),), PAGE_SIZE)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, 0), [32], "cpu")
    for buffer in pool.buffers:
        buffer.fill_(0xFF)
    return pool


def chosen_slowly(query: Tensor, weights: Tensor, keys: list[Tensor]) -> list[int]:
    """Positions that a query [heads, dim] sees; the earliest ones where scores are equal."""
    scores = [
        sum(float(w) * max(0.0, float(q @ key)) for q, w in zip(query, weights, strict=True))
        for key in keys
    ]
    return sorted(sorted(range(len(keys)), key=lambda i: -scores[i])[:COUNT])


def attended_slowly(query: Tensor, rows: Tensor, projection: LatentProjection) -> Tensor:
    """[heads, value dim] of one query over rows [n, row dim]."""
    keys = torch.einsum("hdl,nl->hnd", projection.key, rows[:, :LATENT_DIM])
    scores = torch.einsum("hd,hnd->hn", query[:, :NOPE_DIM], keys)
    scores = (scores + query[:, NOPE_DIM:] @ rows[:, LATENT_DIM:].T) * projection.scale
    values = torch.einsum("hvl,nl->hnv", projection.value, rows[:, :LATENT_DIM])
    return torch.einsum("hn,hnv->hv", scores.softmax(-1), values)


@pytest.mark.parametrize("scores_max", [1, 100, 2**24])
def test_a_pass_over_pages_equals_every_choice_written_out(
    scores_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First chunks and later ones, below, across and behind the number of tokens that are chosen;
    decodes of different lengths; queries that take turns one by one and all at once."""
    monkeypatch.setattr(sparse, "SCORES_MAX", scores_max)
    pool = small_pool()
    pages = shuffled_pages(32, 3)
    lengths = [[3, 1, 1], [COUNT, 1, 1], [COUNT + 1, 1, 1], [4, 5, 3], [1, 12, 1], [9, 1, 7]]
    owned = [[pages.pop() for _ in range(5)] for _ in lengths]
    rows: list[list[Tensor]] = [[] for _ in lengths]
    keys: list[list[Tensor]] = [[] for _ in lengths]
    projection = LatentProjection(
        draw(HEAD_COUNT, NOPE_DIM, LATENT_DIM, seed=1),
        draw(HEAD_COUNT, VALUE_DIM, LATENT_DIM, seed=2),
        scale=0.3,
    )
    for step in range(3):
        chunks = [
            SequenceChunk([0] * sizes[step], len(rows[i]), (owned[i],))
            for i, sizes in enumerate(lengths)
        ]
        batch = ForwardBatch.build(chunks, groups=pool.groups, device="cpu")
        attention = LatentAttention().start(batch, pool)
        count = batch.token_count
        key = draw(count, INDEX_DIM, seed=20 + step)
        choice = KeyChoice(
            INDEX_KEY,
            draw(count, INDEX_HEADS, INDEX_DIM, seed=10 + step),
            draw(count, INDEX_HEADS, seed=30 + step),
            COUNT,
        )
        selection = select(attention, 1, key, choice)
        query = draw(count, HEAD_COUNT, NOPE_DIM + ROPE_DIM, seed=40 + step)
        row = draw(count, LATENT_DIM + ROPE_DIM, seed=50 + step)
        actual = attention.attend_latent(1, query, row, projection, selection)
        token = 0
        for i, sizes in enumerate(lengths):
            for _ in range(sizes[step]):
                rows[i].append(row[token])
                keys[i].append(key[token])
                seen = chosen_slowly(choice.query[token], choice.weights[token], keys[i])
                expected = attended_slowly(
                    query[token], torch.stack([rows[i][position] for position in seen]), projection
                )
                torch.testing.assert_close(actual[token], expected, atol=2e-5, rtol=1e-4)
                token += 1


@pytest.mark.parametrize("count", [1, 3, 8])
def test_equal_scores_are_chosen_from_the_front(count: int) -> None:
    scores = draw(40, 9, seed=1).relu().round()
    for row, is_chosen in zip(scores.tolist(), best_keys(scores, count), strict=True):
        best = sorted(range(9), key=lambda item: -row[item])[:count]
        assert is_chosen.nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_that_end_around_the_number_of_chosen_tokens_equal_transformers(
    name: str, tiny_checkpoint: Checkpoints
) -> None:
    prompt = random_prompt(30, 3)
    model = load_model(tiny_checkpoint(name))
    expected = Reference.load(tiny_checkpoint(name)).logits(prompt)
    n = TOKEN_COUNT
    for sizes in ([30], [n - 1, 1, 1, 1, 4], [n, 6], [n + 1, 5], [n - 4, 10], [1] * 30):
        sequence, pool = Sequence(prompt, shuffled_pages(4, 1)), make_pool(model, 4)
        logits = torch.cat(
            [forward(model, pool, [sequence.chunk(size, all_logits=True)]) for size in sizes]
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_any_number_of_chosen_tokens_equals_transformers(count: int, tmp_path: Path) -> None:
    changes = dict(RECIPES["deepseek_v32"].changes) | {"index_topk": count}
    build_checkpoint(Recipe("DeepseekV32ForCausalLM", changes, seed=3), tmp_path)
    model = load_model(tmp_path)
    sequence, pool = Sequence(random_prompt(40, 3), shuffled_pages(4, 1)), make_pool(model, 4)
    logits = torch.cat(
        [forward(model, pool, [sequence.chunk(n, all_logits=True)]) for n in (20, 18, 1, 1)]
    )
    expected = Reference.load(tmp_path).logits(sequence.token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("component", "layer"),
    [("latent", 1), ("index_k", 0), ("index_k", 2)],
)
@pytest.mark.parametrize("name", NAMES)
def test_every_cached_page_decides_logits(
    name: str, component: str, layer: int, tiny_checkpoint: Checkpoints
) -> None:
    model, prompt = load_model(tiny_checkpoint(name)), [*random_prompt(48, 5), 7]
    results: list[Tensor] = []
    for page in (None, 0, 1, 2):
        pool = make_pool(model, 8)
        sequence = Sequence(prompt, shuffled_pages(8, 1))
        forward(model, pool, [sequence.chunk(48)])
        if page is not None:
            plane = pool.view(component, layer)[sequence.page_ids[page]]
            plane.copy_(draw(*plane.shape, seed=page) * 3.0)
        results.append(forward(model, pool, [sequence.chunk(1)]))
    for changed in results[1:]:
        assert (changed - results[0]).abs().max() > 0.01


def test_index_keys_are_not_read_before_there_is_a_choice(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("deepseek_v32"))
    results: list[Tensor] = []
    for is_spoilt in (False, True):
        pool = make_pool(model, 8)
        sequence = Sequence(random_prompt(TOKEN_COUNT + 1, 5), shuffled_pages(8, 1))
        forward(model, pool, [sequence.chunk(TOKEN_COUNT - 1)])
        if is_spoilt:
            pool.view("index_k", 1).fill_(float("nan"))
        results.append(forward(model, pool, [sequence.chunk(1)]))
    assert torch.equal(results[0], results[1])


def test_decoding_reads_the_chosen_rows_only(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_checkpoint("deepseek_v32"))
    pool, sequence = make_pool(model, 8), Sequence(random_prompt(100, 5), shuffled_pages(8, 1))
    forward(model, pool, [sequence.chunk(99)])
    read: list[tuple[int, int]] = []
    pick, gather = Plane.pick, Plane.gather

    def count_picks(plane: Plane, pages: Tensor, rows: Tensor) -> Tensor:
        read.append((plane.view.shape[-1], rows.numel()))
        return pick(plane, pages, rows)

    def count_gathers(plane: Plane, index: object, scratch: object) -> Tensor:
        rows = gather(plane, index, scratch)  # type: ignore[arg-type]
        read.append((plane.view.shape[-1], rows.shape[2]))
        return rows

    monkeypatch.setattr(Plane, "pick", count_picks)
    monkeypatch.setattr(Plane, "gather", count_gathers)
    forward(model, pool, [sequence.chunk(1)])
    # Index keys of 32 of all pages, then latent rows of 32 + 16; in each of three layers.
    assert read == [(32, 112), (48, TOKEN_COUNT)] * 3


def test_a_cache_of_less_precision_is_chosen_from_as_it_is_stored(
    tiny_checkpoint: Checkpoints,
) -> None:
    model = load_model(tiny_checkpoint("deepseek_v32"))
    results = []
    for sizes in ([40], [20, 20], [39, 1]):
        pool = make_pool(model, 8, kv_cache_dtype="bfloat16")
        sequence = Sequence(random_prompt(40, 6), shuffled_pages(8, 2))
        for size in sizes:
            logits = forward(model, pool, [sequence.chunk(size)])
        results.append(logits)
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(results[0], results[2], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_stays_near_float32(name: str, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint(name), dtype="bfloat16")
    stored = {p.name: p.target.dtype for w in model.weights() for p in w.ways[0]}
    indexer = "model.layers.0.self_attn.indexer"
    assert stored[f"{indexer}.weights_proj.weight"] == torch.float32
    assert stored[f"{indexer}.wq_b.weight"] == torch.bfloat16
    sequence, pool = Sequence(random_prompt(33, 6), shuffled_pages(8, 2)), make_pool(model, 8)
    chunks = [sequence.chunk(size, all_logits=True) for size in (20, 12, 1)]
    logits = torch.cat([forward(model, pool, [chunk]) for chunk in chunks])
    expected = Reference.load(tiny_checkpoint(name)).logits(sequence.token_ids)
    assert pool.view("index_k", 0).dtype == torch.bfloat16
    # A token near the threshold may be chosen or not; the typical difference is looked at.
    assert (logits - expected).abs().median() < 0.15
