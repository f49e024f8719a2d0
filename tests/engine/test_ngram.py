"""Proposals from a sequence's own tokens, against a search by definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from common.engine.speculation.backoff import Backoff
from common.engine.speculation.ngram import (
    MATCH_MAX,
    MATCH_MIN,
    NgramProposer,
    find_continuation,
)
from common.engine.speculation.proposer import Drawn


def found(tokens: list[int], count: int) -> list[int]:
    return find_continuation(np.array(tokens, dtype=np.int32), count)


def by_definition(tokens: list[int], count: int) -> list[int]:
    """Every place before the end, one by one."""

    def matched(end: int) -> int:
        length = 0
        while length < min(MATCH_MAX, end + 1) and tokens[end - length] == tokens[-1 - length]:
            length += 1
        return length

    places = [(matched(end), end) for end in range(len(tokens) - 1)]
    best = max((length for length, _ in places), default=0)
    if best < MATCH_MIN or count == 0:
        return []
    ends = [end for length, end in places if length == best]
    followed = [end for end in ends if end + count < len(tokens)]
    end = followed[-1] if followed else ends[0]
    return tokens[end + 1 : end + 1 + count]


def test_what_followed_the_latest_tokens_is_proposed() -> None:
    assert found([1, 2, 3, 4, 5, 9, 9, 1, 2, 3], 4) == [4, 5, 9, 9]
    assert found([1, 2, 3, 4, 5, 9, 9, 1, 2, 3], 1) == [4]


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    assert found([7, 1, 2, 50, 60, 8, 1, 2, 51, 61, 7, 1, 2], 2) == [50, 60]
    assert found([1, 2, 50, 60, 1, 2, 51, 61, 1, 2], 2) == [51, 61]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [3, 9, 4, 3]])
def test_nothing_is_proposed_where_nothing_stood_before(tokens: list[int]) -> None:
    if tokens:
        assert found(tokens, 4) == []


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_its_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice((2, 3, 12))) for _ in range(rng.randrange(1, 60))]
    for count in (0, 1, 3, 8):
        assert found(tokens, count) == by_definition(tokens, count), (tokens, count)


def test_a_sequence_is_searched_with_all_that_was_drawn_since() -> None:
    proposer = NgramProposer()
    proposer.add(3, np.array([1, 2, 3, 4]))
    proposer.add(0, np.array([5, 6]))
    assert proposer.propose([3, 0], [4, 4]) == [[], []]
    for token in (1, 2):
        proposer.note(Drawn([3], [[token]], [0]))
    proposer.note(Drawn([0, 3], [[5, 6, 7], []], [0, 1]))
    assert proposer.propose([0, 3], [2, 3]) == [[], [3, 4, 1]]
    proposer.remove(3)
    proposer.add(3, np.array([8]))
    assert proposer.propose([3], [4]) == [[]]


def test_proposals_that_fail_become_few_and_those_that_succeed_many_again() -> None:
    """Tokens repeat with a period of two, and what is drawn is something else for a while."""
    proposer = NgramProposer()
    proposer.add(0, np.array([5, 6] * 8))
    counts = []
    for step in range(60):
        (proposed,) = proposer.propose([0], [8])
        counts.append(len(proposed))
        # A token that never stood before, and two that did: what followed them is proposed next.
        proposer.note(Drawn([0], [[1000 + step]], [0]))
        proposer.note(Drawn([0], [[5]], [0]))
        proposer.note(Drawn([0], [[6]], [0]))
    assert counts[0] == 8 and max(counts[1:]) <= 1
    assert 0 < sum(counts[20:]) <= 40 // 3
    counts.clear()
    for _ in range(12):
        (proposed,) = proposer.propose([0], [8])
        counts.append(len(proposed))
        proposer.note(Drawn([0], [[*proposed, 5 if len(proposed) % 2 == 0 else 6]], [0]))
    assert max(counts) == 8


def test_a_first_failure_costs_no_pause() -> None:
    backoff = Backoff()
    assert backoff.limit(4) == 4
    backoff.note(4, 0)
    assert backoff.limit(4) == 1
    backoff.note(1, 1)
    assert backoff.limit(4) == 3
    backoff.note(3, 3)
    assert backoff.limit(4) == 4
    for _ in range(2):
        backoff.note(4, 0)
    assert [backoff.limit(4) for _ in range(3)] == [0, 1, 1]
