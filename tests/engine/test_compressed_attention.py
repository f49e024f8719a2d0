"""Window and blocks under one softmax, against one query at a time; pools full of NaN at first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.engine.attention import compressed
from common.engine.attention.best_keys import KeyChoice, best_keys
from common.engine.attention.compressed import CompressedAttention, SinkRule
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.layout.cache_layout import ServerLayout
from common.layout.component import CacheComponent, Live, LiveKind, Segment, Shard

HEADS, DIM, INDEX_HEADS, INDEX_DIM = 3, 4, 2, 3
WINDOW, SIZE = 6, 4
LAYER = 0
# (cached tokens, new ones): no block, one that closes now, long and short ones together, chunks at
# and across the ends of blocks and pages.
LENGTHS = ((0, 1), (2, 1), (3, 1), (70, 1), (9, 1), (0, 3), (0, 25), (5, 14), (16, 8))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def component(name: str, live: Live, dim: int) -> CacheComponent:
    return CacheComponent(
        name, (LAYER,), (Segment("row", 1, dim * 4),), live, Shard.REPLICATE, "float32"
    )


COMPONENTS = (
    component("window", Live(LiveKind.WINDOW, WINDOW), DIM),
    component("blocks", Live(LiveKind.BLOCK, SIZE), DIM),
    component("index", Live(LiveKind.BLOCK, SIZE), INDEX_DIM),
)


class World:
    """Every sequence of LENGTHS with its past in a pool, and the batch of its new tokens."""

    def __init__(self, page_size: int) -> None:
        layout = ServerLayout(COMPONENTS, 1, ((0, 1),), page_size)
        layout.check()
        self.pool = KvPool.allocate(layout.rank(0, 0), [600, 600], "cpu")
        for buffer in self.pool.buffers:
            buffer.view(torch.float32).fill_(float("nan"))
        free = (torch.randperm(600, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.rows, self.blocks, self.index = {}, {}, {}
        chunks = []
        for number, (cached, new) in enumerate(LENGTHS):
            total = cached + new
            self.rows[number] = draw(total, DIM, seed=10 + number)
            self.blocks[number] = draw(total // SIZE, DIM, seed=30 + number)
            self.index[number] = draw(total // SIZE, INDEX_DIM, seed=50 + number)
            first_seen = max(0, cached - WINDOW + 1)
            pages: list[list[int]] = []
            for group in self.pool.groups:
                owned = [free.pop() for _ in range(group.page_end(total))]
                if group.live.kind is LiveKind.WINDOW:
                    # What is out of every window went back to the pool.
                    first = first_seen // group.page_items
                    owned[:first] = [0] * first
                pages.append(owned)
            for position in range(first_seen, cached):
                self._put("window", pages[0], position, self.rows[number][position])
            for block in range(total // SIZE):
                self._put("blocks", pages[1], block, self.blocks[number][block])
                self._put("index", pages[1], block, self.index[number][block])
            chunks.append(SequenceChunk([0] * new, cached, pages))
        self.batch = ForwardBatch.build(chunks, groups=self.pool.groups, device="cpu")
        self.new_rows = torch.cat([self.rows[i][c:] for i, (c, _) in enumerate(LENGTHS)])

    def _put(self, name: str, pages: list[int], item: int, values: Tensor) -> None:
        view = self.pool.view(name, LAYER)
        items = view.shape[2]
        view[pages[item // items], 0, item % items] = values


def attend_one(query: Tensor, keys: Tensor, sinks: Tensor) -> Tensor:
    """[heads, dim] of one query, head by head."""
    output = []
    for head in range(HEADS):
        scores = [float(query[head] @ key) * DIM**-0.5 for key in keys] + [float(sinks[head])]
        weights = [math.exp(score) for score in scores]
        total = sum(weights)
        output.append(sum(w / total * key for w, key in zip(weights, keys, strict=False)))
    return torch.stack([torch.as_tensor(row) for row in output])


@pytest.mark.parametrize("queries_max", [256, 3])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("chosen", [None, 2, 100])
def test_a_query_sees_its_window_and_the_blocks_closed_by_its_token(
    page_size: int, chosen: int | None, queries_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "QUERIES_MAX", queries_max)
    world = World(page_size)
    token_count = world.batch.token_count
    query, sinks = draw(token_count, HEADS, DIM, seed=1), draw(HEADS, seed=2)
    choice = None
    if chosen is not None:
        choice = KeyChoice(
            component="index",
            query=draw(token_count, INDEX_HEADS, INDEX_DIM, seed=3),
            weights=draw(token_count, INDEX_HEADS, seed=4),
            count=chosen,
        )
    found = CompressedAttention().start(world.batch, world.pool).attend_compressed(
        LAYER, query, world.new_rows, SinkRule(DIM**-0.5, sinks), blocks="blocks", choice=choice
    )  # fmt: skip
    token = 0
    for number, (cached, new) in enumerate(LENGTHS):
        for position in range(cached, cached + new):
            visible = list(range((position + 1) // SIZE))
            if choice is not None and choice.count < len(visible):
                scores = {
                    b: sum(
                        float(choice.weights[token, h])
                        * max(0.0, float(choice.query[token, h] @ world.index[number][b]))
                        for h in range(INDEX_HEADS)
                    )
                    for b in visible
                }
                # Sorting is stable: of equal ones, the first.
                visible = sorted(visible, key=lambda b: -scores[b])[: choice.count]
            window = world.rows[number][max(0, position - WINDOW + 1) : position + 1]
            keys = torch.cat((window, world.blocks[number][visible]))
            expected = attend_one(query[token], keys, sinks)
            torch.testing.assert_close(found[token], expected, atol=1e-5, rtol=0.0)
            token += 1


@pytest.mark.parametrize("has_sinks", [True, False])
def test_a_layer_without_blocks_sees_its_window_only(has_sinks: bool) -> None:
    world = World(page_size=4)
    query, sinks = draw(world.batch.token_count, HEADS, DIM, seed=1), draw(HEADS, seed=2)
    attention = CompressedAttention().start(world.batch, world.pool)
    if has_sinks:
        rule = SinkRule(DIM**-0.5, sinks)
        found = attention.attend_compressed(LAYER, query, world.new_rows, rule, blocks=None)
    else:
        sinks = torch.full((HEADS,), float("-inf"))
        rows = world.new_rows[:, None]
        found = attention.attend(LAYER, query, rows, rows)
    token = 0
    for number, (cached, new) in enumerate(LENGTHS):
        for position in range(cached, cached + new):
            keys = world.rows[number][max(0, position - WINDOW + 1) : position + 1]
            expected = attend_one(query[token], keys, sinks)
            torch.testing.assert_close(found[token], expected, atol=1e-5, rtol=0.0)
            token += 1


def test_of_equal_scores_the_first_are_chosen_however_many_follow() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 4, (200, 17), generator=generator).float()
    scores[:40, 9:] = float("-inf")
    for count in (1, 5, 16, 17, 30):
        chosen = best_keys(scores, count)
        padded = best_keys(torch.nn.functional.pad(scores, (0, 8), value=float("-inf")), count)
        for row in range(len(scores)):
            order = sorted(range(17), key=lambda i: -scores[row, i].item())[:count]
            assert chosen[row].nonzero().flatten().tolist() == sorted(order)
            real = padded[row, :17] & scores[row].isfinite()
            assert torch.equal(real, chosen[row] & scores[row].isfinite())
