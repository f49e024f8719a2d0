"""SDPA over windows, softcaps and sinks against plain softmax, one query and head at a time.

Every byte of the pool that a query may not see is NaN: rows before the window, pages that were
given back, rows behind the last token. One of them in a sum would show.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from common.engine.attention.scores import PLAIN, ScoreRule
from common.engine.attention.sdpa import SdpaAttention
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, CacheComponent, Live, LiveKind, Segment, Shard

HEADS, KV_HEADS, DIM = 6, 2, 8
PAGE_COUNT = 300


def window_pool(widths: tuple[int, ...], page_size: int) -> KvPool:
    """Layer i sees widths[i] tokens, 0 for all; every float is NaN."""
    components = tuple(
        CacheComponent(
            name,
            tuple(layer for layer, of_layer in enumerate(widths) if of_layer == width),
            (Segment("head", KV_HEADS, DIM * 4),),
            Live(LiveKind.WINDOW, width) if width else FULL,
            Shard.SPLIT,
            "float32",
        )
        for width in sorted(set(widths))
        for name in ("k", "v")
    )
    layout = ServerLayout(components, 1, ((0, len(widths)),), page_size)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, 0), [PAGE_COUNT] * len(layout.groups), "cpu")
    for buffer in pool.buffers:
        buffer.view(torch.float32).fill_(float("nan"))
    return pool


class Story:
    """One sequence: all its keys and values, and pages of its own for what is still to be seen."""

    def __init__(self, length: int, layer_count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (layer_count, length, KV_HEADS, DIM)
        self.keys = torch.randn(shape, generator=generator)
        self.values = torch.randn(shape, generator=generator)
        self.queries = torch.randn((layer_count, length, HEADS, DIM), generator=generator)
        self.pages: list[list[int]] = []

    def hold(self, pool: KvPool, start: int, free: list[list[int]], widths: list[int]) -> None:
        """Write the window that a query at `start` sees, as a transfer would; all else stays NaN.

        Pages before the window are the scratch page: those that were given back are others' now.
        """
        length = self.keys.shape[1]
        for group, items in enumerate(pool.page_items):
            width = widths[group]
            first = max(0, start - width + 1) if width else 0
            count = -(-length // items)
            head = first // items
            self.pages.append([0] * head + [free[group].pop() for _ in range(count - head)])
            for component in pool.layout.groups[group].group.components:
                source = self.keys if component.name == "k" else self.values
                for layer in component.layers:
                    view = pool.view(component.name, layer)
                    for position in range(first, start):
                        page = self.pages[group][position // items]
                        view[page, :, position % items] = source[layer, position]

    def expected(self, layer: int, query: int, width: int, rule: ScoreRule) -> Tensor:
        """[HEADS, DIM] of one query, with nothing but sums."""
        first = max(0, query - width + 1) if width else 0
        rows = []
        for head in range(HEADS):
            keys = self.keys[layer, first : query + 1, head // (HEADS // KV_HEADS)].double()
            values = self.values[layer, first : query + 1, head // (HEADS // KV_HEADS)].double()
            scores = keys @ self.queries[layer, query, head].double()
            scores = scores * (rule.scale if rule.scale is not None else DIM**-0.5)
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = scores.exp()
            total = weights.sum()
            if rule.sinks is not None:
                total = total + rule.sinks[head].double().exp()
            rows.append((weights[:, None] * values).sum(0) / total)
        return torch.stack(rows).float()


RULES = {
    "plain": PLAIN,
    "scaled": ScoreRule(scale=0.2),
    "capped": ScoreRule(scale=1.1, softcap=1.5),
    "sinks": ScoreRule(sinks=torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])),
    "all": ScoreRule(scale=0.7, softcap=2.0, sinks=torch.linspace(-2, 2, HEADS)),
}
# (tokens before, new tokens): first chunks, later ones, decodes; around windows and pages.
LENGTHS = [(0, 1), (0, 7), (0, 23), (5, 3), (16, 9), (40, 17), (3, 1), (8, 1), (15, 1), (70, 1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("page_size", "width"), [(4, 8), (4, 9), (16, 5), (1, 3), (8, 1), (8, 64)])
def test_windows_equal_plain_attention_and_see_nothing_else(
    rule: str, page_size: int, width: int
) -> None:
    pool = window_pool((0, width), page_size)
    order = random.Random(page_size)
    free = [list(range(1, PAGE_COUNT + 1)) for _ in pool.page_items]
    for pages in free:
        order.shuffle(pages)
    for lengths in (LENGTHS, [pair for pair in LENGTHS if pair[1] == 1]):
        stories = [Story(sum(pair), 2, seed) for seed, pair in enumerate(lengths)]
        for story, (start, _) in zip(stories, lengths, strict=True):
            story.hold(pool, start, free, [0, width])
        batch = ForwardBatch.build(
            [
                SequenceChunk([0] * new, start, story.pages)
                for story, (start, new) in zip(stories, lengths, strict=True)
            ],
            groups=pool.groups,
            device="cpu",
        )
        attention = SdpaAttention().start(batch, pool)
        for layer in (0, 1):
            query, key, value = (
                torch.cat(
                    [
                        part[layer, start : start + new]
                        for part, (start, new) in zip(parts, lengths, strict=True)
                    ]
                )
                for parts in (
                    [story.queries for story in stories],
                    [story.keys for story in stories],
                    [story.values for story in stories],
                )
            )
            output = attention.attend(layer, query, key, value, RULES[rule])
            expected = torch.stack(
                [
                    story.expected(layer, position, (0, width)[layer], RULES[rule])
                    for story, (start, new) in zip(stories, lengths, strict=True)
                    for position in range(start, start + new)
                ]
            )
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
        free = [list(range(PAGE_COUNT, 0, -1)) for _ in pool.page_items]
        for buffer in pool.buffers:
            buffer.view(torch.float32).fill_(float("nan"))
