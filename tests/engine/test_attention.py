"""SDPA over pages against plain softmax attention, buckets, and the check of other backends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.attention import buckets
from common.engine.attention.attention import AttentionPass
from common.engine.attention.buckets import PADDING_PAGES_FREE, bucket_by_pages
from common.engine.attention.choose import choose_attention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import TOLERANCE, AttentionShape, check_attention
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.errors import ConfigError
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from tests.engine.paged_decoding import shuffled_pages

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4


def make_pool(page_count: int) -> KvPool:
    components = gqa_components(
        layer_count=2, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    layout = ServerLayout(components, 1, ((0, 2),), PAGE)
    pool = KvPool.allocate(layout.rank(0, 0), [page_count], "cpu")
    generator = torch.Generator().manual_seed(0)
    values = pool.buffers[0].view(torch.float32)
    values.copy_(torch.randn(values.shape, generator=generator))
    return pool


def deal(lengths: list[tuple[int, int]], seed: int) -> tuple[KvPool, ForwardBatch]:
    """A batch of (cached, new) tokens per sequence, on shuffled pages of random content."""
    counts = [-(-(cached + new) // PAGE) for cached, new in lengths]
    pages = shuffled_pages(sum(counts), seed)
    chunks = [
        SequenceChunk([0] * new, cached, ([pages.pop() for _ in range(count)],))
        for (cached, new), count in zip(lengths, counts, strict=True)
    ]
    pool = make_pool(sum(counts))
    return pool, ForwardBatch.build(chunks, groups=pool.groups, device="cpu")


def plain_attention(pool: KvPool, batch: ForwardBatch, layer: int, query: Tensor) -> Tensor:
    """One token, one head at a time, keys read from the pool by position."""
    outputs = torch.empty_like(query)
    row = 0
    for sequence, (new, total) in enumerate(
        zip(batch.query_lengths, batch.kv_length_list, strict=True)
    ):
        table = batch.page_tables[0][sequence].tolist()
        for position in range(total - new, total):
            seen = [(table[p // PAGE], p % PAGE) for p in range(position + 1)]
            for head in range(HEADS):
                unit = head // (HEADS // KV_HEADS)
                keys, values = (
                    torch.stack([pool.view(c, layer)[page, unit, r] for page, r in seen])
                    for c in ("k", "v")
                )
                weights = torch.softmax(keys @ query[row, head] * DIM**-0.5, dim=0)
                outputs[row, head] = weights @ values
            row += 1
    return outputs


BATCHES = {
    "one token": [(0, 1)],
    "first chunk": [(0, 9)],
    "later chunk": [(6, 5)],
    "chunk on a page end": [(8, 4)],
    "decode": [(11, 1)],
    "decodes of equal length": [(7, 1), (7, 1)],
    "decodes of mixed lengths": [(0, 1), (3, 1), (21, 1), (4, 1)],
    "mixed": [(5, 1), (0, 6), (3, 1), (9, 7), (15, 1)],
    "very different lengths": [(300, 1), (2, 1), (290, 1), *[(1, 1)] * 8],
}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_sdpa_over_pages_equals_plain_attention(
    name: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_parts:
        monkeypatch.setattr(buckets, "GATHERED_NBYTES_EACH", 4000)
    pool, batch = deal(BATCHES[name], seed=2)
    generator = torch.Generator().manual_seed(1)
    attention = SdpaAttention().start(batch, pool)
    for layer in range(2):
        query, key, value = (
            torch.randn(batch.token_count, heads, DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        output = attention.attend(layer, query, key, value)
        pages, rows = batch.token_pages[0], batch.token_rows[0]
        assert torch.equal(pool.view("k", layer)[pages, :, rows], key)
        assert torch.equal(pool.view("v", layer)[pages, :, rows], value)
        expected = plain_attention(pool, batch, layer, query)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0.0)


POISONED_BATCHES = {
    "decodes": [(0, 1), (3, 1), (21, 1), (4, 1), (8, 1)],
    "several buckets": [(300, 1), (2, 1), (290, 1), *[(1, 1)] * 8],
    "one short decode": [(1, 1)],
    "mixed": [(5, 1), (0, 6), (3, 1), (9, 7), (15, 1)],
}


@pytest.mark.parametrize("name", POISONED_BATCHES)
def test_nothing_but_a_sequences_own_tokens_is_ever_multiplied(name: str) -> None:
    """NaN in scratch, behind the last token of every sequence and in one sequence's tokens."""
    results = []
    for is_poisoned in (False, True):
        pool, batch = deal(POISONED_BATCHES[name], seed=2)
        ends = batch.kv_length_list
        if is_poisoned:
            for component in ("k", "v"):
                view = pool.view(component, 0)
                view[0] = float("nan")
                for sequence, end in enumerate(ends):
                    page = int(batch.page_tables[0][sequence, (end - 1) // PAGE])
                    view[page, :, (end - 1) % PAGE + 1 :] = float("nan")
        query, key, value = (
            torch.ones(batch.token_count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        if is_poisoned and batch.sequence_count > 1:
            value[-1] = float("nan")
        results.append(SdpaAttention().start(batch, pool).attend(0, query, key, value))
    expected, actual = results
    rows = slice(None, -1) if len(expected) > 1 else slice(None)
    assert torch.equal(actual[rows], expected[rows])
    assert batch.sequence_count == 1 or actual[-1].isnan().all()


def test_very_different_lengths_use_several_buckets() -> None:
    counts = [76, 1, 73, *[1] * 8]
    assert len(bucket_by_pages(counts)) == 2
    assert bucket_by_pages([3, 3, 3]) == [[0, 1, 2]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=80))
def test_buckets_hold_every_sequence_once_with_little_padding(counts: list[int]) -> None:
    parts = bucket_by_pages(counts)
    assert sorted(i for bucket in parts for i in bucket) == list(range(len(counts)))
    for bucket in parts:
        useful = sum(counts[i] for i in bucket)
        padded = max(counts[i] for i in bucket) * len(bucket)
        assert padded - useful <= max(PADDING_PAGES_FREE, useful // 4)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 2000))
def test_buckets_have_so_many_pages_at_most(counts: list[int], page_max: int) -> None:
    parts = bucket_by_pages(counts, page_max)
    assert sorted(i for bucket in parts for i in bucket) == list(range(len(counts)))
    for bucket in parts:
        padded = max(counts[i] for i in bucket) * len(bucket)
        assert padded <= page_max or len(bucket) == 1


KIND = AttentionKind(8, 2, 64)
SHAPE = AttentionShape((KIND,), torch.float32, torch.device("cpu"), 16)
RULED = AttentionKind(8, 2, 64, window=40, scale=0.2, softcap=5.0, has_sinks=True)


@pytest.mark.parametrize("kind", [KIND, RULED])
def test_the_reference_passes_its_own_check(kind: AttentionKind) -> None:
    assert check_attention(SdpaAttention(), kind, SHAPE) == 0.0


class Broken:
    """SDPA with one planted mistake."""

    name = "broken"

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def start(self, batch: ForwardBatch, pool: KvPool) -> AttentionPass:
        return BrokenPass(self.mistake, batch, pool)


class BrokenPass:
    def __init__(self, mistake: str, batch: ForwardBatch, pool: KvPool) -> None:
        self.mistake = mistake
        self.inner = SdpaAttention().start(batch, pool)
        self.pool = pool

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        match self.mistake:
            case "heads interleaved":
                order = torch.arange(8).view(2, 4).t().flatten()
                out = torch.empty_like(query)
                out[:, order] = self.inner.attend(layer, query[:, order], key, value)
                return out
            case "scale":
                return self.inner.attend(layer, query * 1.1, key, value)
            case "keys and values swapped":
                return self.inner.attend(layer, query, value, key)
            case "wrong layer":
                return self.inner.attend(1 - layer, query, key, value)
            case "not finite":
                return self.inner.attend(layer, query, key, value) / 0.0
            case "not written":
                view = self.pool.view("k", layer)
                before = view.clone()
                output = self.inner.attend(layer, query, key, value)
                view.copy_(before)
                return output
        raise AssertionError(self.mistake)


@pytest.mark.parametrize(
    "mistake",
    [
        "heads interleaved",
        "scale",
        "keys and values swapped",
        "wrong layer",
        "not finite",
        "not written",
    ],
)
def test_the_check_sees_a_wrong_backend(mistake: str) -> None:
    difference = check_attention(Broken(mistake), KIND, SHAPE)
    # Also beyond the widest tolerance, that of bfloat16.
    assert not difference <= max(TOLERANCE.values())


@pytest.mark.parametrize(
    ("shape", "allowed"),
    [
        (SHAPE, "the path of cpu"),
        (AttentionShape((KIND,), torch.float32, torch.device("cuda"), 16), "bfloat16 or float16"),
        (
            AttentionShape((KIND,), torch.bfloat16, torch.device("cuda"), 16, is_compressed=True),
            "windows beside blocks",
        ),
    ],
)
def test_flashinfer_that_is_asked_for_and_can_not_run_is_an_error(
    shape: AttentionShape, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend flashinfer: .*{allowed}"):
        choose_attention(shape, "flashinfer")


def test_sdpa_that_is_asked_for_is_no_shortfall(caplog: pytest.LogCaptureFixture) -> None:
    shape = AttentionShape((KIND,), torch.float32, torch.device("cuda"), 16)
    assert choose_attention(shape).shortfall in caplog.text
    caplog.clear()
    choice = choose_attention(shape, "sdpa")
    assert (choice.attention.name, choice.reason, choice.shortfall) == ("sdpa", "asked for", "")
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "head_dim", "allowed"),
    [
        (torch.float32, 128, "bfloat16 or float16"),
        (torch.bfloat16, 80, "head dim 80, which must be one of 64, 128, 256, 512"),
    ],
)
def test_shapes_without_a_kernel_use_sdpa_on_cuda(
    dtype: torch.dtype, head_dim: int, allowed: str
) -> None:
    kinds = (AttentionKind(8, 2, head_dim),)
    choice = choose_attention(AttentionShape(kinds, dtype, torch.device("cuda"), 16))
    assert choice.attention.name == "sdpa" and "no kernel" in choice.reason
    assert allowed in choice.reason and "SDPA over gathered pages" in choice.shortfall


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent_dim": 256}, "latent dim 256 [+] 64, which must be 512 [+] 64"),
        ({"has_selection": True}, "chosen tokens"),
        ({}, "baton"),
    ],
)
def test_latent_rows_without_a_kernel_are_torchs_on_cuda(
    changes: dict[str, int], reason: str
) -> None:
    kind = replace(LatentKind(16, 512, 64, 128, 128, 0.1), **changes)  # type: ignore[arg-type]
    shape = AttentionShape((), torch.bfloat16, torch.device("cuda"), 16, latent=kind)
    choice = choose_attention(shape)
    assert choice.attention.name == "latent torch"
    with pytest.raises(ConfigError, match=reason):
        choose_attention(shape, "flashinfer")


def test_a_cache_of_another_dtype_uses_sdpa_on_cuda() -> None:
    shape = AttentionShape(
        (KIND,), torch.bfloat16, torch.device("cuda"), 16, cache_dtype=torch.float16
    )
    choice = choose_attention(shape)
    assert choice.attention.name == "sdpa" and "torch.float16" in choice.reason


class Rounded:
    """SDPA whose output is rounded down by one last bit of bfloat16."""

    name = "rounded"

    def start(self, batch: ForwardBatch, pool: KvPool) -> AttentionPass:
        return RoundedPass(SdpaAttention().start(batch, pool))


class RoundedPass:
    def __init__(self, inner: AttentionPass) -> None:
        self.inner = inner

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = self.inner.attend(layer, query, key, value)
        rounded = (output.view(torch.int16) - 1).view(torch.bfloat16)
        return torch.where(output == 0.0, output, rounded)


def test_a_last_bit_of_a_large_value_is_within_the_tolerance() -> None:
    kind = AttentionKind(32, 8, 128)
    shape = AttentionShape((kind,), torch.bfloat16, torch.device("cpu"), 16)
    difference = check_attention(Rounded(), kind, shape)
    assert 0.0 < difference <= TOLERANCE[torch.bfloat16] / 2


def test_ranks_of_one_process_have_an_attention_each() -> None:
    """It has memory that its passes write to."""
    shape = replace(SHAPE, dtype=torch.float16)
    assert choose_attention(shape).attention is not choose_attention(shape).attention
