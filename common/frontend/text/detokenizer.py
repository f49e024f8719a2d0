"""Token ids to text, one token at a time: the pieces joined are what decoding all at once gives.

A piece is given out once nothing that follows can change it, so half a character never shows. Each
token costs the same however long the text has become. Knows no tokenizer files and no stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# How many tokens back a window looks for one that has a text; tokens without one are rare.
ANCHOR_COUNT_MAX = 8
# Longest wait for the rest of a character: it has at most 4 bytes, a token at least one.
PENDING_COUNT_MAX = 4
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Takes the tokens of one output in order."""

    def push(self, token_id: int) -> str:
        """The text that is final now that this token is known."""

    def flush(self) -> str:
        """The rest, once no token follows; half a character shows as U+FFFD."""


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is a byte string: an incremental UTF-8 decoder.

    bytes_of: the bytes of a token id. skipped: ids that have no text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window, and gives out what the new tokens add.

    A decoder may join, strip or replace by looking at a token's neighbours. So the window starts
    with an anchor, tokens whose text is out already:

        ... anchor anchor | pending pending new
                          ^ text up to here is out

    Bytes that stand for characters outside the vocabulary wait for the token after them, since the
    decoder turns a run of them into text as a whole or not at all.

    decode: text of ids, special ones included. prompt_ids: what the output follows. is_skipped:
    a token that has no text, such as a special one or one that the tokenizer does not know.
    may_split_characters: a token other than a single byte may hold a part of a character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        *,
        is_skipped: Callable[[int], bool],
        is_byte_token: Callable[[int], bool],
        may_split_characters: bool,
    ) -> None:
        self._decode = decode
        self._is_skipped = is_skipped
        self._is_byte_token = is_byte_token
        self._may_split_characters = may_split_characters
        self._pending: list[int] = []
        tail = [i for i in prompt_ids[-ANCHOR_COUNT_MAX:] if not is_skipped(i)]
        self._anchor = self._choose_anchor(tail)
        self._anchor_text = decode(self._anchor)

    def push(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._pending.append(token_id)
        if self._is_byte_token(token_id):
            return ""
        text = self._decode(self._anchor + self._pending)
        is_split = self._may_split_characters and text.endswith(REPLACEMENT)
        if is_split and len(self._pending) < PENDING_COUNT_MAX:
            return ""
        return self._take(text)

    def flush(self) -> str:
        if not self._pending:
            return ""
        return self._take(self._decode(self._anchor + self._pending))

    def _take(self, text: str) -> str:
        if text.startswith(self._anchor_text):
            piece = text[len(self._anchor_text) :]
        else:  # the prompt ended inside a character that the output completes
            piece = self._decode(self._pending)
        self._anchor = self._choose_anchor(self._anchor + self._pending)
        self._anchor_text = self._decode(self._anchor)
        self._pending = []
        return piece

    def _choose_anchor(self, ids: list[int]) -> list[int]:
        """The shortest tail of `ids` that has a text, else the longest that is looked at."""
        for count in range(1, min(len(ids), ANCHOR_COUNT_MAX) + 1):
            if self._decode(ids[-count:]):
                return ids[-count:]
        return ids[-ANCHOR_COUNT_MAX:]
