"""Digests of servers with a draft: each is of the token behind its tokens, too."""

from __future__ import annotations

import pytest

from common.prefix_digests import DIGEST_NBYTES, digests_nbytes, extend_digests

SEED = bytes(DIGEST_NBYTES)
TOKENS = list(range(100, 150))
STRIDE = 4


def digests(tokens: list[int]) -> list[bytes]:
    made = extend_digests(SEED, tokens, STRIDE, 1)
    return [made[at : at + DIGEST_NBYTES] for at in range(0, len(made), DIGEST_NBYTES)]


def test_a_digest_changes_with_the_next_token_and_not_with_those_behind_it() -> None:
    whole = digests(TOKENS)
    for changed in range(len(TOKENS)):
        other = digests([*TOKENS[:changed], 7, *TOKENS[changed + 1 :]])
        equal = [
            number
            for number, pair in enumerate(zip(whole, other, strict=True))
            if pair[0] == pair[1]
        ]
        # The digest of a number covers the tokens before 4 * number, and the next one.
        assert equal == [n for n in range(len(whole)) if n == 0 or STRIDE * n < changed]


@pytest.mark.parametrize("count", range(14))
def test_a_digest_is_made_once_the_next_token_is_known(count: int) -> None:
    made = extend_digests(SEED, TOKENS[:count], STRIDE, 1)
    assert (
        len(made)
        == digests_nbytes(count, STRIDE, 1)
        == DIGEST_NBYTES * (1 + sum(STRIDE * number < count for number in range(1, 9)))
    )


def test_digests_are_the_same_however_many_tokens_are_known_at_first() -> None:
    for known in range(len(TOKENS)):
        first = extend_digests(SEED, TOKENS[:known], STRIDE, 1)
        assert extend_digests(first, TOKENS, STRIDE, 1) == extend_digests(SEED, TOKENS, STRIDE, 1)


def test_a_server_without_a_draft_makes_others() -> None:
    assert extend_digests(SEED, TOKENS, STRIDE) != extend_digests(SEED, TOKENS, STRIDE, 1)
