"""The pair under a virtual clock: every request ends once and right, every page comes back."""

from __future__ import annotations

import pytest

from common.layout.cache_layout import PageGroup
from common.protocol.local import Send
from tests.sim.sim_worker import SimWorker
from tests.sim.story import run_story

# Of the stories below that pass as long as nothing is planted.
PLANTED_SEEDS = range(20)


@pytest.mark.parametrize("seed", range(20))
def test_without_accidents_every_request_is_answered_right(seed: int) -> None:
    world = run_story(seed, has_accidents=False)
    expected = [
        client
        for client in world.clients.values()
        if not client.is_cancelled
        and not client.is_orphan
        and world.nodes[client.node].role == "decode"
    ]
    assert [client.failure for client in expected if client.finals != ["finished"]] == []


@pytest.mark.parametrize("seed", range(100))
def test_whatever_breaks_every_request_ends_once_and_no_page_is_lost(seed: int) -> None:
    run_story(seed)


def fails_somewhere() -> bool:
    for seed in PLANTED_SEEDS:
        try:
            run_story(seed, has_accidents=False)
        except AssertionError:
            return True
    return False


def test_a_window_page_that_is_freed_one_token_early_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def page_first_too_late(group: PageGroup, token_count: int) -> int:
        start = group.live.items(token_count).start
        return min(start + 1, token_count) // group.page_items if group.live.size else 0

    monkeypatch.setattr(PageGroup, "page_first", page_first_too_late)
    assert fails_somewhere()


def test_window_pages_that_are_paired_by_their_place_in_the_list_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if both sides' lists began at the same page: what breaks when page sizes differ."""
    write = SimWorker.write

    def write_by_place(
        self: SimWorker, send: Send, rows: list[tuple[int, int]], values: list[object]
    ) -> None:
        places: dict[int, int] = {}
        for group, position in rows:
            places.setdefault(group, position)
        shifted = [
            (group, position - places[group] + send.target_pages[group][0] * self.page_size)
            if group > 0
            else (group, position)
            for group, position in rows
        ]
        write(self, send, shifted, values)  # type: ignore[arg-type]

    monkeypatch.setattr(SimWorker, "write", write_by_place)
    assert fails_somewhere()
