"""States of sequences: read and written against one page at a time, in a pool full of NaN."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from common.engine.cache.cast import cast, raw
from common.engine.cache.kv_pool import KvPool
from common.engine.cache.slots import SlotPass
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Segment, Shard

SLOT_COUNT = 12
LAYERS = (0, 2, 3)
PLANES = [("conv", "q"), ("conv", "k"), ("conv", "v"), ("state", None)]


def components(state_dtype: str = "float32") -> tuple[CacheComponent, ...]:
    """A convolution in three parts beside a wider state, and keys in a page group of their own."""
    nbytes = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
    return (
        CacheComponent("k", (1,), (Segment("head", 2, 16),), FULL, Shard.SPLIT, "float32"),
        CacheComponent(
            "conv",
            LAYERS,
            (Segment("q", 2, 6), Segment("k", 2, 6), Segment("v", 4, 10)),
            SLOT,
            Shard.SPLIT,
            "bfloat16",
        ),
        CacheComponent(
            "state",
            LAYERS,
            (Segment("head", 4, 5 * nbytes[state_dtype]),),
            SLOT,
            Shard.SPLIT,
            state_dtype,
        ),
    )


def nan_pool(state_dtype: str = "float32", tp_size: int = 1) -> KvPool:
    layout = ServerLayout(components(state_dtype), tp_size, ((0, 4),), 4, layer_group_count=2)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, tp_size - 1), [8, SLOT_COUNT], "cpu")
    for layer in LAYERS:
        for component, segment in PLANES:
            pool.view(component, layer, segment).fill_(float("nan"))
    return pool


def batch_of(pool: KvPool, starts: list[int], slots: list[int]) -> ForwardBatch:
    """Two new tokens behind every start; keys all go to pages that are never read."""
    chunks = [
        SequenceChunk([0, 0], start, ([0] * pool.groups[0].page_end(start + 2), [slot]))
        for start, slot in zip(starts, slots, strict=True)
    ]
    return ForwardBatch.build(chunks, groups=pool.groups, device="cpu")


def random_states(like: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, like.shape[1], like.shape[3], generator=generator) * 10


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_states_are_those_of_the_slot_and_new_sequences_start_at_zero(
    state_dtype: str, tp_size: int
) -> None:
    pool = nan_pool(state_dtype, tp_size)
    rng = random.Random(tp_size)
    owner_states: dict[tuple[int, str, int, str | None], Tensor] = {}
    lengths: dict[int, int] = {}
    for step in range(6):
        slots = rng.sample(range(1, SLOT_COUNT + 1), rng.choice([1, 5, 9]))
        # A slot that is free, or changes its owner, starts again: what is left in it is stale.
        starts = [0 if rng.random() < 0.3 else lengths.get(slot, 0) for slot in slots]
        states = SlotPass(batch_of(pool, starts, slots), pool)
        for layer in LAYERS:
            for component, segment in PLANES:
                view = pool.view(component, layer, segment)
                read = states.read(component, layer, segment)
                assert read.dtype == view.dtype
                for row, (start, slot) in enumerate(zip(starts, slots, strict=True)):
                    key = (slot, component, layer, segment)
                    known = owner_states[key] if start else torch.zeros_like(view[slot, :, 0])
                    assert torch.equal(raw(read[row]), raw(known))
                written = random_states(view, len(slots), step * 10 + layer)
                states.write(component, layer, segment, written)
                for row, slot in enumerate(slots):
                    owner_states[slot, component, layer, segment] = cast(written, view.dtype)[row]
        lengths |= {slot: start + 2 for slot, start in zip(slots, starts, strict=True)}


def test_a_write_touches_no_other_slot_or_plane() -> None:
    pool = nan_pool()
    states = SlotPass(batch_of(pool, [3, 0], [7, 2]), pool)
    before = [buffer.clone() for buffer in pool.buffers]
    values = random_states(pool.view("state", 2), 2, 0)
    states.write("state", 2, None, values)
    changed = (pool.buffers[1] != before[1]).sum()
    assert 0 < int(changed) <= values.numel() * 4
    assert torch.equal(pool.view("state", 2)[[7, 2], :, 0], values)
    pool.view("state", 2)[[7, 2]] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(pool.buffers, before, strict=True))


def test_what_was_read_is_no_view_of_the_slot() -> None:
    pool = nan_pool()
    states = SlotPass(batch_of(pool, [3], [7]), pool)
    read = states.read("conv", 0, "q")
    states.write("conv", 0, "q", torch.ones_like(read))
    assert bool(read.isnan().all())


def test_states_of_another_shape_are_a_bug() -> None:
    pool = nan_pool()
    states = SlotPass(batch_of(pool, [0, 0], [1, 2]), pool)
    with pytest.raises(AssertionError):
        states.write("state", 0, None, torch.zeros(2, 4, 6))
    with pytest.raises(KeyError):
        states.read("conv", 0)
