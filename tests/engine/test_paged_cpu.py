"""Attention over pages on a CPU: against SDPA, by definition, and what it must not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.engine import native_modules
from common.engine.attention.choose import choose_attention
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.paged_cpu import PagedCpuAttention
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import (
    TOLERANCE,
    AttentionShape,
    check_attention,
    random_batch,
)
from common.engine.cache.cast import CACHE_DTYPES
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch
from common.layout.cache_layout import ServerLayout
from common.layout.families import windowed_gqa_components

CPU = torch.device("cpu")
KIND = AttentionKind(8, 2, 64)
SHAPE = AttentionShape((KIND,), torch.float32, CPU, 16)


@pytest.fixture(autouse=True, params=native_modules.VECTORS)
def _usable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_modules, "VECTORS", (request.param,))
    try:
        PagedCpuAttention(())
    except RuntimeError as exc:
        pytest.skip(str(exc))


KINDS = {
    "one head": AttentionKind(1, 1, 16),
    "grouped": KIND,
    "ungrouped": AttentionKind(4, 4, 32),
    "a group that is no power of two": AttentionKind(14, 2, 64),
    "heads that are no whole vectors of keys": AttentionKind(6, 2, 80),
    "large heads": AttentionKind(4, 1, 256),
    "largest heads": AttentionKind(2, 1, 512),
    "window": AttentionKind(8, 2, 64, window=40),
    "window of one token": AttentionKind(8, 2, 32, window=1),
    "everything": AttentionKind(8, 2, 64, window=37, scale=0.1, softcap=5.0, has_sinks=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer_equals_sdpa(name: str, dtype: torch.dtype) -> None:
    kind = KINDS[name]
    shape = AttentionShape((kind,), dtype, CPU, 16)
    assert check_attention(PagedCpuAttention([kind]), kind, shape) <= TOLERANCE[dtype]


@pytest.mark.parametrize("page_size", [1, 2, 5, 64])
def test_pages_of_any_size_are_read(page_size: int) -> None:
    kind = replace(KIND, window=21)
    shape = replace(SHAPE, kinds=(kind,), page_size=page_size)
    assert check_attention(PagedCpuAttention([kind]), kind, shape) <= TOLERANCE[torch.float32]


LENGTHS = ((0, 300), (129, 9), (500, 8), (127, 1), (0, 1), (64, 128))


def random_case(
    dtype: torch.dtype = torch.float32, window: int = 0
) -> tuple[KvPool, ForwardBatch, list[Tensor]]:
    """A pool of random content, a batch over it, and its queries, keys and values."""
    name = next(name for name, each in CACHE_DTYPES.items() if each == dtype)
    components = windowed_gqa_components(
        windows=(window,), kv_head_count=2, head_dim=64, dtype=name
    )
    layout = ServerLayout(components, 1, ((0, 1),), 16)
    page_count = sum(-(-sum(each) // 16) for each in LENGTHS) + 3
    pool = KvPool.allocate(layout.rank(0, 0), [page_count], CPU)
    generator = torch.Generator().manual_seed(0)
    for component in ("k", "v"):
        view = pool.view(component, 0)
        view.copy_(torch.randn(view.shape, generator=generator))
    batch = random_batch(LENGTHS, pool, CPU)
    parts = [
        torch.randn(batch.token_count, heads, 64, generator=generator).to(dtype)
        for heads in (8, 2, 2)
    ]
    return pool, batch, parts


def by_definition(
    pool: KvPool, batch: ForwardBatch, query: Tensor, wide: torch.dtype = torch.float64
) -> Tensor:
    """Every token of every sequence by itself."""
    outputs, row = torch.empty(query.shape, dtype=wide), 0
    for index, (new, total) in enumerate(
        zip(batch.query_lengths, batch.kv_length_list, strict=True)
    ):
        table = batch.page_tables[0][index, : -(-total // 16)].long()
        keys, values = (
            pool.view(part, 0)[table].transpose(0, 1).flatten(1, 2).to(wide) for part in ("k", "v")
        )
        for end in range(total - new + 1, total + 1):
            heads = query[row].to(wide).view(2, 4, 64)
            weights = (heads @ keys[:, :end].transpose(1, 2) / 8).softmax(-1)
            outputs[row] = (weights @ values[:, :end]).reshape(8, 64)
            row += 1
    return outputs


def test_tiles_and_rows_equal_attention_by_definition() -> None:
    pool, batch, (query, key, value) = random_case()
    actual = PagedCpuAttention([KIND]).start(batch, pool).attend(0, query, key, value)
    expected = by_definition(pool, batch, query)
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=0.0)


def test_scores_of_keys_with_a_large_bias_keep_their_differences() -> None:
    """Rounded to bfloat16, scores of about a hundred would differ by halves."""
    pool, batch, (query, key, value) = random_case(torch.bfloat16)
    bias = torch.full((64,), 12.0)
    pool.view("k", 0).copy_(pool.view("k", 0).float() + bias)
    query, key = (query + 1).to(torch.bfloat16), (key + bias).to(torch.bfloat16)
    actual = PagedCpuAttention([KIND]).start(batch, pool).attend(0, query, key, value)
    expected = by_definition(pool, batch, query)
    assert float((actual.double() - expected).abs().max()) < 0.03


def test_nothing_but_a_sequences_own_tokens_is_ever_read() -> None:
    """NaN on every page of the pool that no sequence has, and behind every last token."""
    results = []
    for is_poisoned in (False, True):
        pool, batch, (query, key, value) = random_case()
        if is_poisoned:
            for part in ("k", "v"):
                view = pool.view(part, 0)
                kept = torch.full_like(view, float("nan"))
                for index, total in enumerate(batch.kv_length_list):
                    for page in range(-(-total // 16)):
                        number = int(batch.page_tables[0][index, page])
                        rows = slice(0, min(16, total - page * 16))
                        kept[number, :, rows] = view[number, :, rows]
                view.copy_(kept)
        results.append(PagedCpuAttention([KIND]).start(batch, pool).attend(0, query, key, value))
    assert torch.equal(*results)


@pytest.mark.parametrize("part", ["k", "v"])
def test_a_cache_that_is_not_finite_is_seen_in_what_is_computed_from_it(part: str) -> None:
    pool, batch, parts = random_case()
    rows = torch.repeat_interleave(
        torch.arange(batch.sequence_count), torch.tensor(batch.query_lengths)
    )
    for sequence in (1, 2, 5):  # few new tokens and many; the first cached one is wrong
        pool.view(part, 0)[int(batch.page_tables[0][sequence, 0]), :, 0] = float("nan")
    rule = ScoreRule(softcap=30.0)
    kinds = [KIND, replace(KIND, softcap=30.0)]
    for rules in ((), (rule,)):
        output = PagedCpuAttention(kinds).start(batch, pool).attend(0, *parts, *rules)
        is_wrong = ~output.isfinite().flatten(1).all(1)
        assert is_wrong[(rows == 1) | (rows == 2) | (rows == 5)].all()
        assert not is_wrong[(rows == 0) | (rows == 3) | (rows == 4)].any()


def test_queries_that_lie_among_keys_and_values_are_read_where_they_are() -> None:
    pool, batch, parts = random_case()
    joined = torch.cat(parts, 1)
    apart = torch.split(joined, [8, 2, 2], 1)
    attention = PagedCpuAttention([KIND])
    assert torch.equal(
        attention.start(batch, pool).attend(0, *apart),
        attention.start(batch, pool).attend(0, *parts),
    )


@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 3), (11, 2, 1), (1, 20, 9)])
def test_proposals_attend_and_are_written_as_if_each_came_by_itself(
    counts: tuple[int, int, int], window: int
) -> None:
    """Rows of a sequence that decode together see one another's keys: those before them."""
    (pool, batch, _), (twin, _, _) = random_case(window=window), random_case(window=window)
    generator = torch.Generator().manual_seed(sum(counts))
    kind, numbers = replace(KIND, window=window), (0, 2, 1)
    lengths = [
        batch.kv_length_list[number] - count + row + 1
        for number, count in zip(numbers, counts, strict=True)
        for row in range(count)
    ]
    tables = batch.page_tables[0][
        torch.repeat_interleave(torch.tensor(numbers), torch.tensor(counts))
    ]
    rows = ForwardBatch.from_tensors(
        token_ids=torch.zeros(len(lengths), dtype=torch.int64),
        positions=torch.tensor(lengths) - 1,
        query_lengths=[1] * len(lengths),
        kv_lengths=lengths,
        page_tables=[tables],
        groups=pool.groups,
        logits_rows=None,
    )
    query, key, value = (
        torch.randn(len(lengths), heads, 64, generator=generator) for heads in (8, 2, 2)
    )
    together = PagedCpuAttention([kind]).start(rows, pool).attend(0, query, key, value)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = rows.decodes(row, row + 1, torch.zeros(1, dtype=torch.int64))
        expected = SdpaAttention().start(alone, twin).attend(0, query[one], key[one], value[one])
        torch.testing.assert_close(together[one], expected, atol=2e-6, rtol=0.0)
    for part in ("k", "v"):
        assert torch.equal(pool.view(part, 0), twin.view(part, 0))


def test_a_kind_that_was_not_tried_is_left_to_sdpa() -> None:
    pool, batch, parts = random_case()
    output = PagedCpuAttention([]).start(batch, pool).attend(0, *parts)
    assert torch.equal(output, SdpaAttention().start(batch, pool).attend(0, *parts))


def test_a_page_that_the_pool_does_not_have_is_refused() -> None:
    pool, batch, parts = random_case()
    batch.page_tables[0][2, 1] = pool.page_counts[0] + 1
    with pytest.raises(ValueError, match="page id is outside the pool"):
        PagedCpuAttention([KIND]).start(batch, pool).attend_shared(0, parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_attends_over_pages(dtype: torch.dtype) -> None:
    choice = choose_attention(replace(SHAPE, dtype=dtype))
    assert choice.attention.name == "onednn" and not choice.shortfall
    assert "head dim 64: differs from sdpa by" in choice.reason
    assert choose_attention(replace(SHAPE, dtype=dtype), "sdpa").attention.name == "sdpa"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "no kernel for torch.float16"),
        ({"cache_dtype": torch.float8_e4m3fn}, "over a cache of torch.float8_e4m3fn"),
        ({"kinds": (AttentionKind(4, 2, 8),)}, "head dim 8, which must be a multiple of 16"),
    ],
)
def test_what_has_no_kernel_is_sdpas_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    choice = choose_attention(replace(SHAPE, **changes))  # type: ignore[arg-type]
    assert choice.attention.name == "sdpa" and reason in choice.reason
