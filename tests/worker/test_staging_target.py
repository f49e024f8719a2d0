"""A decode rank's staging buffer: who gets slots, and what may be scattered from them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.planner.pairing import TokenRange
from common.planner.staging import StagedPair
from common.protocol.descriptor import StagingBufferDescriptor
from common.protocol.staging import SlotFilled, SlotFreed
from common.protocol.worker import Expect, Forget, Forgotten
from common.transport.copies import copy_runs
from common.transport.loader import load_ucx
from common.worker.staging.copier import Copier
from common.worker.staging.target import (
    RING_SLOT_COUNT_MAX,
    SLOT_NBYTES_MIN,
    FreeSlots,
    StagingTarget,
    slot_nbytes_of,
)

TOKENS = 20
PAGES = [(0, [3, 1, 5])]


def gqa(tp: int = 1, page_size: int = 8, dtype: str = "float32") -> ServerLayout:
    components = gqa_components(layer_count=2, kv_head_count=4, head_dim=4, dtype=dtype)
    return ServerLayout(components, tp, ((0, 2),), page_size)


SOURCE = gqa(page_size=16)


class Rank:
    """A target rank with a pool of random content, one slot of its region full of other content."""

    def __init__(self, dtype: str = "float32") -> None:
        load_ucx("auto")
        self.layout = gqa(dtype=dtype).ranks[0]
        self.pool = KvPool.allocate(self.layout, [8], "cpu")
        generator = torch.Generator().manual_seed(1)
        buffer = self.pool.buffers[0]
        buffer.copy_(torch.randint(0, 100, buffer.shape, generator=generator))
        self.region = torch.zeros(16 * SLOT_NBYTES_MIN, dtype=torch.uint8)
        self.region.copy_(torch.randint(0, 100, self.region.shape, generator=generator))
        copier = Copier(self.pool.buffers, copy_runs)
        self.staging_target = StagingTarget(self.region, copier, self.layout, [8], "127.0.0.1")
        self.pair = StagedPair(SOURCE.ranks[0], self.layout)

    def open(self, peer: str) -> StagingBufferDescriptor:
        opened = self.staging_target.open(peer, SOURCE, "")
        assert isinstance(opened, StagingBufferDescriptor)
        return opened

    def filled(self, descriptor: StagingBufferDescriptor, **changes: int) -> SlotFilled:
        """All of the request of TOKENS tokens in one piece, in the first slot of the ring."""
        (piece,) = self.pair.pieces(TokenRange(0, TOKENS, is_final=True), SLOT_NBYTES_MIN)
        ring = descriptor.rings[0]
        message = SlotFilled(
            ring.ring,
            1,
            ring.slots[0],
            70,
            piece.group,
            piece.row_first,
            piece.row_stop,
            piece.item_first,
            piece.item_stop,
        )
        return msgspec.structs.replace(message, **changes)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.staging_target.end()


# ---- slots ---------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.lists(st.integers(0, 12), max_size=12), st.randoms())
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_no_slot_has_two_owners_and_none_is_lost(
    count: int, asked: list[int], random: object
) -> None:
    slots = FreeSlots(count)
    held: list[list[int]] = []
    for ring_count in asked:
        granted = slots.grant(ring_count)
        if granted is None:
            assert ring_count == 0 or slots.free_count < ring_count
            if held:
                slots.put_back(held.pop())
            continue
        assert len(granted) == ring_count
        assert all(1 <= len(ring) <= RING_SLOT_COUNT_MAX for ring in granted)
        held += granted
        owned = [slot for ring in held for slot in ring]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(count))
        assert slots.free_count == count - len(owned)


def test_a_newcomer_leaves_half_of_what_is_free_to_the_next() -> None:
    slots = FreeSlots(16)
    sizes = []
    while (granted := slots.grant(1)) is not None:
        sizes.append(len(granted[0]))
    assert sizes == [4, 4, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("region", "slot"),
    [(1 << 20, 1 << 16), (8 << 20, 1 << 19), (16 << 20, 1 << 20), (64 << 20, 4 << 20)],
)
def test_a_small_region_has_smaller_slots(region: int, slot: int) -> None:
    assert slot_nbytes_of(region) == slot


# ---- what is scattered ---------------------------------------------------------------------------


def test_what_was_expected_is_scattered_and_touches_nothing_else(rank: Rank) -> None:
    descriptor = rank.open("p")
    rank.staging_target.expect(Expect(70, "p", TOKENS, PAGES))
    before = rank.pool.buffers[0].clone()
    filled = rank.filled(descriptor)
    assert rank.staging_target.apply_filled(filled) == SlotFreed(filled.ring, 1, filled.slot)

    # Oracle: element by element, in the order the head of planner/staging.py promises.
    expected = KvPool(rank.layout, [8], [before])
    slot = rank.region[filled.slot * SLOT_NBYTES_MIN :].view(torch.float32)
    position = 0
    for cell in SOURCE.ranks[0].groups[0].cells:
        view = expected.view(cell.component, cell.layer)
        for unit in range(4):
            for token in range(TOKENS):
                page = PAGES[0][1][token // 8]
                view[page, unit, token % 8] = slot[position : position + 4]
                position += 4
    assert torch.equal(rank.pool.buffers[0], expected.buffers[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transfer_id": 71}, "transfer 71: is not expected from this peer"),
        ({"ring": 5}, "unknown ring"),
        ({"slot": 15}, "slot 15: is not of this ring"),
        ({"group": 1}, "group 1: must be in 0..0"),
        ({"row_first": 16}, "rows 16..16"),
        ({"row_stop": 17}, "rows 0..17: must lie in 0..16"),
        ({"item_stop": TOKENS + 1}, "items 0..21: must lie in 0..20"),
        ({"item_first": TOKENS}, "items 20..20"),
    ],
)
def test_a_forged_piece_is_refused_and_touches_nothing(
    rank: Rank, changes: dict[str, int], named: str
) -> None:
    descriptor = rank.open("p")
    rank.staging_target.expect(Expect(70, "p", TOKENS, PAGES))
    before = rank.pool.buffers[0].clone()
    freed = rank.staging_target.apply_filled(rank.filled(descriptor, **changes))
    assert freed is not None and named in freed.error
    assert torch.equal(rank.pool.buffers[0], before)
    counters = rank.staging_target.counters
    assert counters.refused + counters.late == 1 and counters.pieces == 0


@pytest.mark.parametrize("item_first", [0, 7])
def test_a_piece_of_what_was_there_before_is_refused_and_touches_nothing(
    rank: Rank, item_first: int
) -> None:
    """The first page holds 8 of the 20 tokens: it is not named, and others read it."""
    descriptor = rank.open("p")
    rank.staging_target.expect(Expect(70, "p", TOKENS, [(1, PAGES[0][1][1:])], token_start=8))
    before = rank.pool.buffers[0].clone()
    forged = rank.filled(descriptor, item_first=item_first)
    freed = rank.staging_target.apply_filled(forged)
    assert freed is not None and f"items {item_first}..20: must lie in 8..20" in freed.error
    assert torch.equal(rank.pool.buffers[0], before)
    rest = rank.staging_target.apply_filled(rank.filled(descriptor, item_first=8, sequence=2))
    assert rest is not None and rest.error == ""
    page_nbytes = len(before) // 9
    changed = [page for page in range(9) if not _is_same_page(rank, before, page, page_nbytes)]
    assert changed == [1, 5]


def _is_same_page(rank: Rank, before: torch.Tensor, page: int, page_nbytes: int) -> bool:
    place = slice(page * page_nbytes, (page + 1) * page_nbytes)
    return torch.equal(rank.pool.buffers[0][place], before[place])


def test_another_peers_transfer_is_not_this_peers_to_fill(rank: Rank) -> None:
    rank.open("p")
    other = rank.open("q")
    rank.staging_target.expect(Expect(70, "p", TOKENS, PAGES))
    freed = rank.staging_target.apply_filled(rank.filled(other))
    assert freed is not None and "is not expected from this peer" in freed.error


def test_what_comes_after_forget_is_counted_and_refused(rank: Rank) -> None:
    descriptor = rank.open("p")
    rank.staging_target.expect(Expect(70, "p", TOKENS, PAGES))
    assert rank.staging_target.forget(Forget(70)) == Forgotten(70, 0)
    assert rank.staging_target.forget(Forget(99)) == Forgotten(99, 0)  # never heard of
    before = rank.pool.buffers[0].clone()
    freed = rank.staging_target.apply_filled(rank.filled(descriptor))
    assert freed is not None and freed.error
    assert rank.staging_target.counters.late == 1 and rank.staging_target.expected_count == 0
    assert torch.equal(rank.pool.buffers[0], before)


def test_a_repeated_message_is_answered_alike_and_scattered_once(rank: Rank) -> None:
    descriptor = rank.open("p")
    rank.staging_target.expect(Expect(70, "p", TOKENS, PAGES))
    first = rank.staging_target.apply_filled(rank.filled(descriptor))
    rank.region.zero_()
    held = rank.pool.buffers[0].clone()
    assert rank.staging_target.apply_filled(rank.filled(descriptor)) == first
    assert torch.equal(rank.pool.buffers[0], held)
    newer = rank.staging_target.apply_filled(rank.filled(descriptor, sequence=2))
    assert newer is not None and not newer.error
    # An old one that comes late must not scatter what is in the slot by now.
    assert rank.staging_target.apply_filled(rank.filled(descriptor)) is None


def test_a_slot_filled_without_rows_only_tries_the_link(rank: Rank) -> None:
    ring = rank.open("p").rings[0]
    before = rank.pool.buffers[0].clone()
    freed = rank.staging_target.apply_filled(SlotFilled(ring.ring, 1, ring.slots[0]))
    assert freed == SlotFreed(ring.ring, 1, ring.slots[0])
    assert torch.equal(rank.pool.buffers[0], before)


# ---- peers ---------------------------------------------------------------------------------------


def test_slots_of_a_closed_peer_are_its_own_until_it_is_fenced(rank: Rank) -> None:
    descriptor = rank.open("p")
    free = rank.staging_target.free_slot_count
    rank.staging_target.close("p")
    assert rank.staging_target.free_slot_count == free
    freed = rank.staging_target.apply_filled(rank.filled(descriptor))
    assert freed is not None and "unknown ring" in freed.error
    rank.staging_target.reclaim("p")
    assert rank.staging_target.free_slot_count == 16
    rank.staging_target.reclaim("p")
    rank.staging_target.reclaim("never there")
    assert rank.staging_target.free_slot_count == 16


def test_a_peer_that_comes_again_gets_a_new_ring_and_loses_no_slot(rank: Rank) -> None:
    first = rank.open("p")
    rank.staging_target.close("p")
    second = rank.open("p")
    assert first.rings[0].ring != second.rings[0].ring
    assert rank.staging_target.free_slot_count == 16 - len(second.rings[0].slots)


def test_a_full_region_says_what_to_raise(rank: Rank) -> None:
    refused = ""
    for index in range(10):
        opened = rank.staging_target.open(f"p{index}", SOURCE, "")
        if isinstance(opened, str):
            refused = opened
            break
    assert "0 free slots for 1 source ranks: raise --staging-buffer-mb" in refused


def test_a_payload_that_no_slot_holds_is_refused(rank: Rank) -> None:
    components = gqa_components(layer_count=2, kv_head_count=4, head_dim=1 << 15, dtype="float32")
    huge = ServerLayout(components, 1, ((0, 2),), 8)
    target = StagingTarget(
        rank.region, Copier(rank.pool.buffers, copy_runs), huge.ranks[0], [8], ""
    )
    opened = target.open("p", huge, "")
    assert opened == f"a payload of {4 << 15} bytes does not fit a staging slot of {1 << 16}"
