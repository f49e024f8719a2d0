"""Spare slots for states behind proposals: of the pool's memory, and no scheduler's pages."""

from __future__ import annotations

import pytest

from common.config import Role
from common.engine.cache.kv_pool import KvPool
from common.speculative import SpeculativeAlgorithm
from common.worker.pools import PoolSize, with_spares
from tests.worker.test_checkpoint_counts import layout_of, size_of
from tests.worker.test_pools import MIB, gqa_layout, slot_layout

NGRAM = SpeculativeAlgorithm.NGRAM


def nbytes_of(size: PoolSize) -> int:
    layout = slot_layout()
    return sum(
        KvPool.buffer_nbytes(layout, with_spares(layout, size.page_counts, size.spare_count))
    )


@pytest.mark.parametrize("proposals", [1, 3])
@pytest.mark.parametrize("budget", [20, 64, 200])
def test_slots_behind_proposals_share_the_memory_of_slots(budget: int, proposals: int) -> None:
    size = size_of(
        slot_layout(),
        budget * MIB,
        role=Role.DECODE,
        speculative_algorithm=NGRAM,
        speculative_num_steps=proposals,
    )
    running = size.page_counts[1] - size.checkpoint_max
    assert size.spare_count == proposals * running > 0
    assert nbytes_of(size) <= budget * MIB
    plain = size_of(slot_layout(), budget * MIB, role=Role.DECODE)
    assert plain.spare_count == 0 and running < plain.page_counts[1] - plain.checkpoint_max


def test_a_server_that_never_decodes_has_none() -> None:
    settings = {"speculative_algorithm": NGRAM, "role": Role.PREFILL}
    assert size_of(slot_layout(), 64 * MIB, **settings).spare_count == 0
    size = size_of(slot_layout(), 64 * MIB, **settings, enable_role_switch=True)
    assert size.spare_count > 0


def test_only_slots_have_spare_ones() -> None:
    layout = gqa_layout()
    assert with_spares(layout, [7], 5) == [7]
    every = layout_of(tuple(group.live for group in slot_layout().server.groups))
    assert with_spares(every, [7, 3], 5) == [7, 8]
