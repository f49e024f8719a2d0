"""How caches may travel between two servers, and what may be said of staging slots."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from common.config import TransferMode
from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.layout.component import Segment
from common.layout.families import gqa_components
from common.protocol import peer
from common.protocol.bounds import check_peer_message
from common.protocol.codec import decode_slot_filled, decode_slot_freed, encode
from common.protocol.descriptor import RankDescriptor, StagingBufferDescriptor, StagingRing
from common.protocol.handshake import (
    agree_transfer_mode,
    announced_page_counts,
    compare_layouts,
    compare_transfer_mode,
)
from tests.protocol.examples import DESCRIPTOR, SLOT_FILLED, SLOT_FREED

AUTO, DIRECT, STAGED = TransferMode.AUTO, TransferMode.DIRECT, TransferMode.STAGED


def gqa(dtype: str = "bfloat16", tp: int = 1) -> ServerLayout:
    components = gqa_components(layer_count=4, kv_head_count=8, head_dim=8, dtype=dtype)
    return ServerLayout(components, tp, ((0, 4),), 16)


# ---- the handshake -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        (AUTO, AUTO, AUTO),
        (AUTO, DIRECT, DIRECT),
        (AUTO, STAGED, STAGED),
        (STAGED, STAGED, STAGED),
        (DIRECT, DIRECT, DIRECT),
        (DIRECT, STAGED, None),
    ],
)
def test_both_sides_agree_or_refuse_alike(
    ours: TransferMode, theirs: TransferMode, agreed: TransferMode | None
) -> None:
    assert agree_transfer_mode(ours, theirs) is agreed
    assert agree_transfer_mode(theirs, ours) is agreed
    differences = compare_transfer_mode(ours, theirs)
    assert differences == ([] if agreed else ["transfer mode: ours direct, theirs staged"])


@pytest.mark.parametrize("transfer_mode", [AUTO, STAGED])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("bfloat16", "float8_e4m3fn"), ("float32", "bfloat16"), ("float32", "float8_e4m3fn")],
)
def test_element_types_may_differ_where_transfers_may_be_staged(
    ours: str, theirs: str, transfer_mode: TransferMode
) -> None:
    assert compare_layouts(gqa(ours), gqa(theirs, tp=2), transfer_mode) == []
    assert compare_layouts(gqa(theirs), gqa(ours), transfer_mode) == []
    refused = compare_layouts(gqa(ours), gqa(theirs), DIRECT)
    assert len(refused) == 2 and "a direct transfer does not convert" in refused[0]


@pytest.mark.parametrize(
    ("ours", "theirs"), [("float16", "bfloat16"), ("float16", "float8_e4m3fn")]
)
def test_a_conversion_that_is_not_known_is_refused(ours: str, theirs: str) -> None:
    for transfer_mode in TransferMode:
        difference = compare_layouts(gqa(ours), gqa(theirs), transfer_mode)[0]
        assert difference == (
            f"component k dtype: ours {ours}, theirs {theirs} "
            f"({ours} and {theirs} can't be converted into each other)"
        )


def test_element_types_do_not_hide_a_different_head_size() -> None:
    theirs = dataclasses.replace(
        gqa("float32"),
        components=tuple(
            dataclasses.replace(c, segments=(Segment("head", 8, 8 * 4 * 2),))
            for c in gqa("float32").components
        ),
    )
    differences = compare_layouts(gqa("bfloat16"), theirs, AUTO)
    assert "its units hold different numbers of elements" in differences[0]


# ---- descriptors ---------------------------------------------------------------------------------


def rings(*changes: StagingRing, nbytes: int = 8 << 20) -> RankDescriptor:
    staging_buffer = StagingBufferDescriptor(
        "h:1", ("staging-buffer", 0, nbytes, b""), 1 << 20, list(changes)
    )
    return msgspec.structs.replace(DESCRIPTOR, staging_buffer=staging_buffer)


@pytest.mark.parametrize(
    ("descriptor", "named"),
    [
        (rings(StagingRing(0, 1, [8])), r"slots=8: must be in 0\.\.7"),
        (rings(StagingRing(0, 1, [-1])), "smallest of .*slots=-1"),
        (rings(StagingRing(0, 1, [1, 1])), "granted twice"),
        (rings(StagingRing(0, 1, [1]), StagingRing(1, 2, [1])), "granted twice"),
        (rings(StagingRing(0, 1, [1]), StagingRing(0, 2, [2])), "must have one ring"),
        (rings(StagingRing(0, 1, [])), "must have one ring of at least one slot"),
        (rings(StagingRing(0, -1, [1])), "ring=-1"),
        (rings(StagingRing(1024, 1, [1])), "source_rank=1024"),
        (rings(StagingRing(0, 1, [0]), nbytes=(1 << 20) - 1), r"slots=0: must be in 0\.\.-1"),
        (rings(StagingRing(0, 1, [1] * 4097)), "4097 entries"),
        (msgspec.structs.replace(DESCRIPTOR, page_counts=[-1]), "page_counts=-1"),
    ],
)
def test_slots_that_can_not_be_are_named(descriptor: RankDescriptor, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        check_peer_message(peer.Attach("d", "p", [descriptor]))


def test_a_rank_whose_pages_are_out_of_reach_says_how_many_it_has() -> None:
    def announced(count: list[int], rank: int = 0) -> RankDescriptor:
        ring = rings(StagingRing(0, 1, [0]))
        return msgspec.structs.replace(ring, rank=rank, regions=[], page_counts=count)

    both = [announced([9]), announced([7], rank=1)]
    assert announced_page_counts(gqa(tp=2), both) == (7,)
    with pytest.raises(ProtocolError, match="page counts of 2 page groups: there are 1"):
        announced_page_counts(gqa(), [announced([9, 9])])
    with pytest.raises(ProtocolError, match="announced 0 pages: must be at least 1"):
        announced_page_counts(gqa(), [announced([0])])
    without = msgspec.structs.replace(announced([9]), staging_buffer=None)
    with pytest.raises(ProtocolError, match="0 regions for 1 page groups"):
        announced_page_counts(gqa(), [without])


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(SLOT_FILLED[0])])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_every_number_of_a_filled_slot_has_bounds(field: str, value: int) -> None:
    message = msgspec.structs.replace(SLOT_FILLED[0], **{field: value})
    with pytest.raises(ProtocolError, match=f"SlotFilled.{field}="):
        decode_slot_filled(encode(message))


@pytest.mark.parametrize("field", ["ring", "sequence", "slot"])
def test_every_number_of_a_freed_slot_has_bounds(field: str) -> None:
    message = msgspec.structs.replace(SLOT_FREED[0], **{field: -1})
    with pytest.raises(ProtocolError, match=f"SlotFreed.{field}=-1"):
        decode_slot_freed(encode(message))
    with pytest.raises(ProtocolError, match=r"length of SlotFreed\.error"):
        decode_slot_freed(encode(msgspec.structs.replace(SLOT_FREED[0], error="x" * 8193)))
