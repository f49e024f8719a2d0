"""Digests agree between any two layouts, and see any byte that is not what was sent."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import Verify
from common.engine.cache.cast import CACHE_DTYPES, cast
from common.layout.cache_layout import ServerLayout
from common.layout.component import (
    FULL,
    SLOT,
    CacheComponent,
    Live,
    LiveKind,
    Segment,
    Shard,
)
from common.layout.families import gqa_components
from common.layout.parallel import split_layers
from common.planner.digests import (
    SAMPLE_STRIDE,
    Difference,
    add_digests,
    digested_planes,
    find_difference,
)
from common.planner.pairing import TokenRange
from common.protocol.codec import encode_layout
from common.protocol.digests import Digest
from common.worker.digester import Digester
from tests.planner.cases import Case, PairPlans, cases
from tests.planner.oracle import lives_of, page_of_item, sent_items, transfer

PROPERTY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TRANSFER = 0x1234_5678_9ABC_DEF1
# Whole caches, and what lies behind a prefix that the target has.
DELTAS = st.one_of(cases(from_start=True), cases(from_start=True, has_prefix=True))


class Pair:
    """Both sides of a transfer that has been made, with a digester per rank."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.source, self.target = case.servers()
        transfer(self.source, self.target, case.pieces, PairPlans())
        self.tokens = TokenRange(case.pieces[0].start, case.pieces[-1].stop, is_final=True)

    def digests(self, *, is_source: bool, verify: Verify, transfer: int) -> list[bytes]:
        """Of every target rank: the sum of what the source ranks say, or each one's own."""
        own, other = (self.source, self.target) if is_source else (self.target, self.source)
        found: list[list[bytes]] = []
        for rank in own.layout.ranks:
            buffers = [
                torch.frombuffer(own.memory[rank.index, group], dtype=torch.uint8)
                if len(own.memory[rank.index, group])
                else torch.empty(0, dtype=torch.uint8)
                for group in range(len(rank.groups))
            ]
            pages = [(first, list(ids)) for first, ids in own.pages]
            job = Digest(
                transfer,
                encode_layout(other.layout),
                is_source,
                self.tokens.stop,
                pages,
                verify,
                self.tokens.start,
            )
            found.append(Digester(buffers, rank).run(job).digests)
        if not is_source:
            return [own_digests for (own_digests,) in found]
        total = found[0]
        for more in found[1:]:
            total = add_digests(total, more)
        return total

    def differences(
        self, verify: Verify = Verify.FULL, transfer: int = TRANSFER
    ) -> list[Difference]:
        sent = self.digests(is_source=True, verify=verify, transfer=transfer)
        found = self.digests(is_source=False, verify=verify, transfer=transfer)
        differences = []
        for rank, mine, theirs in zip(self.target.layout.ranks, sent, found, strict=True):
            planes = digested_planes(rank, verify, transfer)
            difference = find_difference(
                rank, planes, self.tokens.stop, mine, theirs, token_start=self.tokens.start
            )
            assert not isinstance(difference, str), difference
            if difference is not None:
                differences.append(difference)
        return differences


@pytest.mark.slow
@PROPERTY
@given(DELTAS, st.sampled_from([Verify.SAMPLE, Verify.FULL]), st.integers(0, 2**63))
def test_what_was_handed_over_has_the_digests_of_what_was_sent(
    case: Case, verify: Verify, transfer: int
) -> None:
    assert Pair(case).differences(verify, transfer) == []


@pytest.mark.slow
@PROPERTY
@given(DELTAS, st.randoms(use_true_random=False))
def test_any_byte_that_differs_is_found_and_its_place_is_named(
    case: Case, rng: random.Random
) -> None:
    pair = Pair(case)
    target = pair.target
    rank, group = rng.choice(list(target.memory))
    live = lives_of(target.layout)[group]
    items = sent_items(live, pair.tokens)
    planes = target.planes[rank, group]
    if not items or not planes:
        return
    plane, item = rng.choice(planes), rng.choice(items)
    page = page_of_item(live, target.layout.page_size, item)
    start = target.start_of(rank, group, plane, item)
    target.memory[rank, group][start + rng.randrange(plane.nbytes)] ^= 1 << rng.randrange(8)
    (difference,) = pair.differences()
    component_index, segment_index, layer, _ = plane.key
    component = target.layout.components[component_index]
    assert (difference.rank, difference.component) == (rank, component.name)
    assert (difference.segment, difference.layer) == (component.segments[segment_index].name, layer)
    assert difference.first_page <= page <= difference.last_page


@pytest.mark.parametrize("live", [FULL, Live(LiveKind.BLOCK, 4)])
@pytest.mark.parametrize(("page_size", "start"), [(8, 8), (16, 16), (8, 24)])
def test_what_the_target_had_before_is_in_no_digest(live: Live, page_size: int, start: int) -> None:
    """24 tokens in pages of 16 at the source; 8 begins in the middle of one, 24 is all of them."""
    component = CacheComponent("c", (0,), (Segment("s", 2, 8),), live, Shard.SPLIT, "float32")
    source, target = (ServerLayout((component,), 1, ((0, 1),), size) for size in (16, page_size))
    first = start // page_size
    count = -(-24 // page_size) - first
    target_pages = [(first, list(range(1, count + 1)))]
    piece = TokenRange(start, 24, is_final=True)
    case = Case(source, target, [(0, [2, 1])], target_pages, [2], [count], [piece])
    pair = Pair(case)
    before = pair.digests(is_source=True, verify=Verify.FULL, transfer=TRANSFER)
    assert pair.differences() == []
    for item in range(24 // max(1, live.size)):
        (plane, *_) = pair.source.planes[0, 0]
        place = pair.source.start_of(0, 0, plane, item)
        pair.source.memory[0, 0][place] ^= 1
        after = pair.digests(is_source=True, verify=Verify.FULL, transfer=TRANSFER)
        is_prefix = item < start // max(1, live.size)
        assert (after == before) == is_prefix, item
        found = [(d.first_page, d.last_page) for d in pair.differences()]
        page = page_of_item(live, page_size, item)
        assert found == ([] if is_prefix else [(page, page)])
        pair.source.memory[0, 0][place] ^= 1


def gqa_case(layer_count: int, dtype: str = "float32") -> Case:
    components = gqa_components(layer_count=layer_count, kv_head_count=2, head_dim=4, dtype=dtype)
    layout = ServerLayout(components, 1, split_layers(layer_count, 1), 8)
    pages = [(0, [3, 1, 2])]
    return Case(layout, layout, pages, pages, [3], [3], [TokenRange(0, 21, is_final=True)])


@pytest.mark.parametrize("byte_count", [1, 2, 8])
def test_items_that_changed_places_are_found(byte_count: int) -> None:
    """Payloads of any word are tied to their item: a sum alone would not see it."""
    component = CacheComponent(
        "c", (0,), (Segment("s", 1, byte_count),), FULL, Shard.SPLIT, "float8_e4m3fn"
    )
    layout = ServerLayout((component,), 1, ((0, 1),), 8)
    pages = [(0, [1])]
    pair = Pair(Case(layout, layout, pages, pages, [1], [1], [TokenRange(0, 8, is_final=True)]))
    memory = pair.target.memory[0, 0]
    first = slice(8 * byte_count, 9 * byte_count)
    second = slice(10 * byte_count, 11 * byte_count)
    assert memory[first] != memory[second]
    memory[first], memory[second] = memory[second], memory[first]
    assert len(pair.differences()) == 1


def test_a_page_that_stayed_zero_is_found_by_every_sample() -> None:
    pair = Pair(gqa_case(layer_count=12))
    page_nbytes = pair.target.page_nbytes[0, 0]
    pair.target.memory[0, 0][2 * page_nbytes : 3 * page_nbytes] = bytes(page_nbytes)
    for transfer_id in range(32):
        (difference,) = pair.differences(Verify.SAMPLE, transfer_id)
        assert difference.first_page <= 2 <= difference.last_page, "page 2 is the third one"


def test_one_layer_of_a_page_that_stayed_zero_is_found_by_one_sample_in_eight() -> None:
    """Of 24 planes each sample has 3, and every plane is as likely."""
    layer_count = 12
    pair = Pair(gqa_case(layer_count))
    found_count = 0
    plane = pair.target.planes[0, 0][5]
    start = pair.target.page_nbytes[0, 0] + plane.offset
    pair.target.memory[0, 0][start : start + plane.nbytes * 8] = bytes(plane.nbytes * 8)
    transfer_count = 400
    rng = random.Random(1)
    for _ in range(transfer_count):
        found_count += bool(pair.differences(Verify.SAMPLE, rng.getrandbits(63)))
    assert 0.7 < found_count * SAMPLE_STRIDE / transfer_count < 1.3


@pytest.mark.parametrize(
    ("stored", "wire"),
    [("float32", "bfloat16"), ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")],
)
@pytest.mark.parametrize("is_wide_source", [True, False])
def test_converted_caches_are_compared_as_they_travelled(
    stored: str, wire: str, is_wide_source: bool
) -> None:
    wide, narrow = gqa_case(2, stored).source, gqa_case(2, wire).source
    rank, count = wide.ranks[0], 4
    wide_nbytes = rank.groups[0].page_nbytes * count
    values = torch.randn(wide_nbytes // CACHE_DTYPES[stored].itemsize) * 100
    sent = cast(values, CACHE_DTYPES[stored])
    received = cast(sent, CACHE_DTYPES[wire])
    if not is_wide_source:
        sent = cast(received, CACHE_DTYPES[stored])
    pages = [(0, [3, 1, 2])]
    digests = [
        Digester([memory.view(torch.uint8)], own.ranks[0])
        .run(Digest(TRANSFER, encode_layout(other), is_source, 21, pages, Verify.FULL))
        .digests
        for memory, own, other, is_source in (
            (sent, wide, narrow, is_wide_source),
            (received, narrow, wide, not is_wide_source),
        )
    ]
    assert digests[0] == digests[1] != [bytes(len(digests[0][0]))]


def test_a_slot_that_stayed_zero_is_found() -> None:
    component = CacheComponent(
        "state", (0, 2), (Segment("s", 4, 12),), SLOT, Shard.SPLIT, "float32"
    )
    sides = [ServerLayout((component,), tp, ((0, 3),), 8) for tp in (2, 4)]
    pages = [(0, [2])]
    case = Case(*sides, pages, pages, [2], [2], [TokenRange(0, 5, is_final=True)])
    pair = Pair(case)
    assert pair.differences() == []
    pair.target.memory[3, 0][:] = bytes(len(pair.target.memory[3, 0]))
    assert [(d.rank, d.layer, d.group) for d in pair.differences()] == [(3, 0, "slot")]
