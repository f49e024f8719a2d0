"""What the simulated model says and sees, without pages: all that the workers share with the judge.

Full groups, windows and tails hold token ids, a block holds the sum of its tokens, and a slot the
sum of all tokens so far: one that is stale, mixed up or a token late gives another token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import assert_never

from common.layout.component import Live, LiveKind

VOCAB_SIZE = 997
STATE_MODULUS = 2**31 - 1


def next_token(tokens: list[int], lives: Sequence[Live], seed: int = 0) -> int:
    """What the model says after `tokens`, of which each part of it sees what its rule tells."""
    return drawn([value for live in lives for value in seen(tokens, live)], seed)


def drawn(read: list[int], seed: int) -> int:
    """What is drawn from what was read: samples of one prompt differ from their first token on."""
    return digest([*read, seed] if seed else read)


def seen(tokens: list[int], live: Live) -> list[int]:
    """What a part of the model sees when `tokens` are computed."""
    count = len(tokens)
    match live.kind:
        case LiveKind.FULL:
            return tokens
        case LiveKind.WINDOW:
            return tokens[max(0, count - live.size) :]
        case LiveKind.BLOCK:
            starts = range(0, count - live.size + 1, live.size)
            return [fold(0, tokens[start : start + live.size]) for start in starts]
        case LiveKind.TAIL:
            return tokens[max(0, count - count % live.size - live.back) :]
        case LiveKind.SLOT:
            return [fold(0, tokens)]
        case _:
            assert_never(live.kind)


def rows_to_send(
    lives: Sequence[Live], start: int, stop: int, *, is_last: bool
) -> list[tuple[int, int]]:
    """(group, item) of what leaves once tokens [start, stop) of a prompt are computed."""
    rows: list[tuple[int, int]] = []
    for group, live in enumerate(lives):
        if live.kind is LiveKind.FULL:
            rows += [(group, position) for position in range(start, stop)]
        elif live.kind is LiveKind.BLOCK:
            rows += [(group, item) for item in range(start // live.size, stop // live.size)]
        elif is_last:
            # Final with the prompt only; leaves by absolute position.
            rows += [(group, item) for item in live.items(stop)]
    return rows


def digest(read: list[int]) -> int:
    return zlib.crc32(array("q", read).tobytes()) % VOCAB_SIZE


def fold(state: int, tokens: list[int]) -> int:
    """A sum in which every token and its place count."""
    for token in tokens:
        state = (state * 31 + token + 1) % STATE_MODULUS
    return state
