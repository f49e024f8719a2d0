"""DeepSeek-V4 at every border of its blocks, windows and pages, and what it needs to go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from common.errors import ConfigError
from common.layout.component import LiveKind
from tests.engine.paged_decoding import make_pool
from tests.engine.tiny_checkpoints import Reference, random_prompt

Checkpoints = Callable[[str], Path]

# Of the recipe: tokens of a short block, of a long one, and of the window.
SHORT, LONG, WINDOW = 4, 16, 12
TOKENS = random_prompt(120, 8)


class Batch:
    """Sequences of the same tokens, each as far as it likes, every page its own."""

    def __init__(self, model: CausalLm, count: int, page_size: int, dtype: str = "auto") -> None:
        self.model = model
        pages = count * max(1, -(-len(TOKENS) // page_size), len(TOKENS) // SHORT)
        self.pool = make_pool(model, pages, page_size=page_size, kv_cache_dtype=dtype)
        self.free = [list(range(1, pages + 1)) for _ in self.pool.groups]
        self.pages: list[list[list[int]]] = [[[] for _ in self.pool.groups] for _ in range(count)]
        self.done = [0] * count

    def run(self, lengths: list[int]) -> list[Tensor]:
        """Logits of the next so many tokens of each sequence; nothing for 0."""
        chunks = []
        for index, length in enumerate(lengths):
            stop = self.done[index] + length
            for group, free, owned in zip(
                self.pool.groups, self.free, self.pages[index], strict=True
            ):
                while len(owned) < group.page_end(stop):
                    owned.append(free.pop())
            if length:
                start = self.done[index]
                chunks.append(
                    SequenceChunk(TOKENS[start:stop], start, self.pages[index], range(length))
                )
                self.done[index] = stop
        batch = ForwardBatch.build(chunks, groups=self.pool.groups, device="cpu")
        logits = self.model.forward(batch, self.pool)
        assert logits is not None
        return list(logits.split_with_sizes([length for length in lengths if length]))

    def row(self, component: str, layer: int, index: int, item: int) -> Tensor:
        """Where an item of a sequence lies."""
        group = self.pool.groups[self.pool.group_of(component)]
        page = item // group.page_items if group.live.is_paged else 0
        page_id = self.pages[index][self.pool.group_of(component)][page]
        return self.pool.view(component, layer)[page_id, 0, item % group.page_items]


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("deepseek_v4")


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLm:
    return load_model(path)


@pytest.fixture(scope="module")
def expected(path: Path) -> Tensor:
    """Of all TOKENS; transformers computes them at once."""
    return Reference.load(path).logits(TOKENS)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_of_any_length_is_decoded_on_as_transformers_computes_it(
    page_size: int, model: CausalLm, expected: Tensor
) -> None:
    """Every residue of both blocks, shorter than a block or the window, and past two long ones."""
    lengths = list(range(1, LONG + 3))
    batch = Batch(model, len(lengths), page_size)
    for length, logits in zip(lengths, batch.run(lengths), strict=True):
        torch.testing.assert_close(logits, expected[:length], atol=1e-4, rtol=0.0)
    for step in range(2 * LONG + 2):
        for length, logits in zip(lengths, batch.run([1] * len(lengths)), strict=True):
            torch.testing.assert_close(logits[0], expected[length + step], atol=1e-4, rtol=0.0)


def test_chunks_of_any_sizes_give_what_one_does(model: CausalLm, expected: Tensor) -> None:
    """Chunks that end inside, at and behind the ends of blocks, beside tokens that are decoded."""
    steps = [[100, 1, 3, 4], [1, 5, 16, 1], [2, 11, 1, 7], [3, 2, 17, 1], [4, 30, 30, 60]]
    batch = Batch(model, 4, page_size=8)
    found: list[list[Tensor]] = [[] for _ in range(4)]
    for lengths in steps:
        for parts, logits in zip(found, batch.run(lengths), strict=True):
            parts.append(logits)
    for parts in found:
        logits = torch.cat(parts)
        torch.testing.assert_close(logits, expected[: len(logits)], atol=1e-4, rtol=0.0)


def live_rows(pool: KvPool, component: str, length: int) -> range:
    return pool.groups[pool.group_of(component)].live.items(length)


@pytest.mark.parametrize("length", [61, 62, 63, 64])
@pytest.mark.parametrize(
    ("component", "layer", "steps"),
    [
        ("csa_tail", 1, 2 * SHORT),
        ("csa_index_tail", 1, 5 * SHORT),
        ("hca_tail", 0, LONG + 1),
        ("window", 2, 1),
    ],
)
def test_exactly_the_live_rows_decide_what_follows(
    component: str, layer: int, steps: int, length: int, model: CausalLm
) -> None:
    """A sequence per row: noise in a live one changes logits, if only when its block closes; noise
    elsewhere in the ring changes no bit, and neither does a free page."""
    probe = Batch(model, 1, page_size=8)
    group = probe.pool.groups[probe.pool.group_of(component)]
    assert group.live.kind in (LiveKind.TAIL, LiveKind.WINDOW)
    live = group.live.items(length)
    reach = group.page_items if group.live.kind is LiveKind.TAIL else WINDOW + 2
    items = range(max(0, length - reach), length)
    assert items.start <= live.start and live.stop == items.stop
    batch = Batch(model, len(items) + 1, page_size=8)
    batch.run([length] * (len(items) + 1))
    for index, item in enumerate(items):
        row = batch.row(component, layer, index, item)
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(item)) * 4.0)
    differences = torch.zeros(len(items))
    for _ in range(steps):
        *changed, plain = (logits[0] for logits in batch.run([1] * (len(items) + 1)))
        found = torch.stack([(logits - plain).abs().max() for logits in changed])
        differences = torch.maximum(differences, found)
    for item, difference in zip(items, differences.tolist(), strict=True):
        assert (difference > 1e-3) == (item in live), (item, difference)


@pytest.mark.parametrize(
    ("component", "layer"), [("csa_block", 1), ("csa_index", 3), ("hca_block", 0)]
)
def test_every_kind_of_block_decides_what_follows(
    component: str, layer: int, model: CausalLm
) -> None:
    batch = Batch(model, 2, page_size=8)
    batch.run([100, 100])
    for item in live_rows(batch.pool, component, 100):
        row = batch.row(component, layer, 0, item)
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(item)))
    spoiled, plain = batch.run([1, 1])
    assert (spoiled - plain).abs().max() > 1e-2


def test_half_precision_stays_near_float32(path: Path, expected: Tensor) -> None:
    model = load_model(path, dtype="bfloat16")
    batch = Batch(model, 1, page_size=16)
    assert batch.pool.view("window", 0).dtype == torch.bfloat16
    assert batch.pool.view("hca_tail", 0).dtype == torch.float32
    logits = torch.cat([batch.run([size])[0] for size in (20, 12, *([1] * 20))])
    # A router or indexer near a tie may choose another; the typical difference is looked at.
    assert (logits - expected[: len(logits)]).abs().median() < 0.15


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_cache_of_less_precision_than_the_model_is_used_rounded(
    dtype: str, model: CausalLm
) -> None:
    """What is new is seen as the cache will hold it, so chunking changes nothing but the way that
    a value between two is rounded."""
    batch = Batch(model, 3, page_size=16, dtype=dtype)
    whole = batch.run([40, 0, 0])[0]
    for lengths in ([0, 17, 39], [0, 23, 1]):
        last = batch.run(lengths)
    torch.testing.assert_close(last[0], whole[17:], atol=1e-3, rtol=0.0)
    torch.testing.assert_close(last[1], whole[39:], atol=1e-3, rtol=0.0)


def test_weights_that_are_drawn_run(path: Path) -> None:
    """Expert ids of a table are drawn among the experts there are."""
    batch = Batch(load_model(path, load_format="dummy"), 1, page_size=16)
    assert batch.run([30])[0].isfinite().all()


def test_output_groups_are_not_cut(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size=8: must divide 4, the model's o_groups"):
        load_model(path, parallel=ParallelContext(0, 8, 0, 1))
