"""The short convolution against one pass over every whole sequence, over slots of noise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.cache.slots import SlotPass
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.sequence_rows import SequenceRows
from common.engine.layers.short_conv import ConvSegment, ShortConv
from common.layout.cache_layout import ServerLayout
from common.layout.component import SLOT, CacheComponent, Segment, Shard
from common.layout.parallel import units_of_rank

LAYER = 1
# (segment, units, channels of a unit); the first has fewer units than 4 ranks.
SEGMENTS = (("q", 2, 3), ("k", 2, 3), ("v", 4, 5))
CHANNELS = 2 * 3 + 2 * 3 + 4 * 5
# Steps of each of three sequences; a sequence with 0 is not in that pass.
PASSES = ((1, 4, 2), (1, 0, 1), (1, 1, 1), (0, 2, 30), (5, 1, 1))


def make_conv(tp_size: int, tp_rank: int, kernel_size: int, has_bias: bool) -> ShortConv:
    context = LayerContext(
        ParallelContext(tp_rank=tp_rank, tp_size=tp_size), torch.device("cpu"), torch.float32
    )
    segments, first = [], 0
    for name, units, size in SEGMENTS:
        owned = units_of_rank(units, Shard.SPLIT, tp_size, tp_rank)
        channels = range(first + owned.start * size, first + owned.stop * size)
        segments.append(ConvSegment(name, "conv", CHANNELS, channels, size))
        first += units * size
    return ShortConv(context, LAYER, segments, kernel_size=kernel_size, has_bias=has_bias)


def fill(conv: ShortConv, tensors: dict[str, Tensor]) -> None:
    for weight in conv.weights():
        (piece,) = weight.ways[0]
        assert tuple(tensors[piece.name].shape) == piece.shape
        piece.target.copy_(tensors[piece.name][piece.take])


def make_pool(tp_size: int, tp_rank: int, kernel_size: int) -> KvPool:
    component = CacheComponent(
        "conv",
        (LAYER,),
        tuple(Segment(name, units, size * (kernel_size - 1) * 4) for name, units, size in SEGMENTS),
        SLOT,
        Shard.SPLIT,
        "float32",
    )
    layout = ServerLayout((component,), tp_size, ((0, 2),), 4)
    layout.check()
    pool = KvPool.allocate(layout.rank(0, tp_rank), [8], "cpu")
    for name, _, _ in SEGMENTS:
        pool.view("conv", LAYER, name).fill_(float("nan"))
    return pool


@pytest.mark.parametrize(("kernel_size", "has_bias"), [(4, False), (2, True)])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_passes_of_any_sizes_equal_one_over_the_whole(
    tp_size: int, kernel_size: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "conv.weight": torch.randn(CHANNELS, 1, kernel_size, generator=generator),
        "conv.bias": torch.randn(CHANNELS, generator=generator),
    }
    totals = [sum(steps[b] for steps in PASSES) for b in range(3)]
    inputs = [torch.randn(total, CHANNELS, generator=generator) for total in totals]
    bias = tensors["conv.bias"] if has_bias else None
    for tp_rank in range(tp_size):
        conv = make_conv(tp_size, tp_rank, kernel_size, has_bias)
        fill(conv, tensors)
        pool = make_pool(tp_size, tp_rank, kernel_size)
        taken = torch.cat([torch.arange(s.channels.start, s.channels.stop) for s in conv.segments])
        seen = [0, 0, 0]
        for steps in PASSES:
            active = [b for b in range(3) if steps[b]]
            chunks = [SequenceChunk([0] * steps[b], seen[b], ([5 - b],)) for b in active]
            batch = ForwardBatch.build(chunks, groups=pool.groups, device="cpu")
            rows = SequenceRows(batch.query_lengths, torch.device("cpu"))
            new = torch.cat([inputs[b][seen[b] : seen[b] + steps[b]] for b in active])
            outputs = conv(new[:, taken], rows, SlotPass(batch, pool)).split(batch.query_lengths)
            for b, actual in zip(active, outputs, strict=True):
                padded = F.pad(inputs[b].t(), (kernel_size - 1, 0))
                whole = F.conv1d(padded, tensors["conv.weight"], bias, groups=CHANNELS)
                expected = F.silu(whole).t()[seen[b] : seen[b] + steps[b], taken]
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
                seen[b] += steps[b]


@pytest.mark.parametrize("lengths", [(6, 1, 2), (1, 1, 1), (2, 5, 3)])
def test_sequences_that_go_on_from_others_of_a_pass_are_one(lengths: tuple[int, ...]) -> None:
    conv, whole, parted = make_conv(1, 0, 4, False), make_pool(1, 0, 4), make_pool(1, 0, 4)
    generator = torch.Generator().manual_seed(0)
    fill(conv, {"conv.weight": torch.randn(CHANNELS, 1, 4, generator=generator)})
    cpu, total = torch.device("cpu"), sum(lengths)
    inputs = torch.randn(total, CHANNELS, generator=generator)

    def batch_of(pool: KvPool, counts: Sequence[int], **more: object) -> ForwardBatch:
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return ForwardBatch.from_tensors(
            token_ids=torch.zeros(total, dtype=torch.int64),
            positions=torch.arange(total),
            query_lengths=counts,
            kv_lengths=[start + count for start, count in zip(starts, counts, strict=True)],
            page_tables=[torch.full((len(counts), 1), 3, dtype=torch.int32)],
            groups=pool.groups,
            logits_rows=torch.zeros(0, dtype=torch.int64),
            **more,  # type: ignore[arg-type]
        )

    expected = conv(inputs, SequenceRows([total], cpu), SlotPass(batch_of(whole, [total]), whole))
    batch = batch_of(parted, lengths, state_pages={0: [5], 1: [6]})
    outputs = conv(inputs, SequenceRows(lengths, cpu, {0, 1}), SlotPass(batch, parted))
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    for name, _, _ in SEGMENTS:
        view, last = parted.view("conv", LAYER, name), whole.view("conv", LAYER, name)
        torch.testing.assert_close(view[3], last[3])
        for page, count in ((5, lengths[0]), (6, lengths[0] + lengths[1])):
            pool = make_pool(1, 0, 4)
            alone = batch_of_first(pool, count)
            conv(inputs[:count], SequenceRows([count], cpu), SlotPass(alone, pool))
            torch.testing.assert_close(view[page], pool.view("conv", LAYER, name)[3])


def batch_of_first(pool: KvPool, count: int) -> ForwardBatch:
    """The first tokens of a sequence whose slot is 3."""
    chunk = SequenceChunk([0] * count, 0, ([3],))
    return ForwardBatch.build([chunk], groups=pool.groups, device="cpu")


def test_a_slot_holds_the_last_inputs_of_a_head_channel_by_channel() -> None:
    conv, pool = make_conv(1, 0, 4, False), make_pool(1, 0, 4)
    fill(conv, {"conv.weight": torch.ones(CHANNELS, 1, 4)})
    batch = ForwardBatch.build([SequenceChunk([0, 0], 0, ([3],))], groups=pool.groups, device="cpu")
    inputs = torch.arange(2.0 * CHANNELS).view(2, CHANNELS)
    conv(inputs, SequenceRows([2], torch.device("cpu")), SlotPass(batch, pool))
    head = pool.view("conv", LAYER, "v")[3, 1, 0].view(5, 3)
    first = 2 * 3 + 2 * 3 + 5
    for channel in range(5):
        at = first + channel
        assert head[channel].tolist() == [0.0, at, CHANNELS + at]
