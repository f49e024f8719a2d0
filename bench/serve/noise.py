"""Tokens as a function of a seed and a place: the same place always has the same tokens.

So a prompt of any length is made when it is sent, from its place on, and nothing is kept. The noise
is splitmix64's. Knows nothing of prompts.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

U64 = np.uint64
_STRIDE = U64(0x9E3779B97F4A7C15)


def own_tokens(
    seed: int, owner: tuple[int, ...], start: int, stop: int, vocab_size: int
) -> list[int]:
    """Tokens start .. stop of an endless text that `owner` has for itself."""
    places = np.arange(start, max(start, stop), dtype=U64)
    return _tokens(U64(_key(seed, owner)) + (places + U64(1)) * _STRIDE, vocab_size)


def block_tokens(
    seed: int, scope: int, ids: array[int], block_size: int, span: tuple[int, int], vocab_size: int
) -> list[int]:
    """Tokens of a half-open span of the text that blocks of `block_size` make, one after another.

    ids: int64, of the blocks; equal ids of one scope are equal tokens.
    """
    places = np.arange(*span, dtype=np.int64)
    keys = _mix(np.array(ids, dtype=U64) * _STRIDE + U64(_key(seed, (-1, scope))))
    blocks, offsets = np.divmod(places, block_size)
    return _tokens(keys[blocks] + (offsets.astype(U64) + U64(1)) * _STRIDE, vocab_size)


def _key(seed: int, owner: tuple[int, ...]) -> int:
    named = ",".join(map(str, (seed, *owner))).encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little")


def _tokens(keys: NDArray[U64], vocab_size: int) -> list[int]:
    tokens: list[int] = (_mix(keys) % U64(vocab_size)).tolist()
    return tokens


def _mix(values: NDArray[U64]) -> NDArray[U64]:
    values = (values ^ (values >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> U64(27))) * U64(0x94D049BB133111EB)
    return values ^ (values >> U64(31))
