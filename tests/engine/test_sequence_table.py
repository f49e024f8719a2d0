"""Page tables of a worker's sequences, for every way a page group can live."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.sequence_table import SequenceTable
from common.layout.cache_layout import PageGroup
from common.layout.component import FULL, SLOT, Live, LiveKind

GROUPS = (
    PageGroup(FULL, 4, ()),
    PageGroup(Live(LiveKind.WINDOW, 6), 4, ()),
    PageGroup(Live(LiveKind.BLOCK, 3), 2, ()),
    PageGroup(Live(LiveKind.TAIL, 3, 1), 4, ()),
    PageGroup(SLOT, 1, ()),
)


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_tables_hold_the_pages_that_the_tokens_need(group: int) -> None:
    for token_count in range(1, 30):
        table = SequenceTable(GROUPS, torch.device("cpu"))
        slots = [table.add(request_id, torch.zeros(1)) for request_id in (7, 8)]
        page_end = GROUPS[group].page_end(token_count)
        pages = list(range(1, page_end + 1))
        table.grant(group, [(slots[0], 0, pages)])
        table.grant(group, [(slots[1], 0, [9] if not GROUPS[group].live.is_paged else [])])
        found = page_table(table, group, slots[:1], [token_count])
        assert found.tolist() == [pages]
        if GROUPS[group].live.is_paged and page_end:
            with pytest.raises(AssertionError):
                page_table(table, group, slots, [1 + token_count, 2 * token_count])


def test_a_slot_that_is_given_back_leaves_no_page_behind() -> None:
    table = SequenceTable(GROUPS, torch.device("cpu"))
    slot = table.add(7, torch.zeros(1))
    table.grant(4, [(slot, 0, [5])])
    table.remove(7)
    assert table.add(8, torch.zeros(1)) == slot
    with pytest.raises(AssertionError):
        page_table(table, 4, [slot], [10])


def page_table(
    table: SequenceTable, group: int, slots: list[int], lengths: list[int]
) -> NDArray[np.int32]:
    return table.page_table(group, np.array(slots), np.array(lengths))


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_pages_cover_as_many_tokens_as_need_no_more_of_them(group: int) -> None:
    table = SequenceTable(GROUPS[group : group + 1], torch.device("cpu"))
    slot = table.add(7, torch.zeros(1))
    for page_count in range(1, 6):
        table.grant(0, [(slot, 0, list(range(1, page_count + 1)))])
        (covered,) = table.covered(np.array([slot]))
        if GROUPS[group].live.is_paged:
            assert GROUPS[group].page_end(int(covered)) <= page_count
            assert GROUPS[group].page_end(int(covered) + 1) > page_count
        else:
            assert covered > 1 << 40
