"""Texts in a body that are longer than any prompt, found without parsing it.

Parsing thirty megabytes keeps the interpreter's lock for a twentieth of a second, and streams wait
for it. Here every single step is short, and the lock can be passed on between them. Knows nothing
of JSON but its strings; the parser refuses a body that is no JSON.
"""

from __future__ import annotations

ESCAPED_NBYTES_MAX = 6
"""Of one escape in JSON text, \\uXXXX, which stands for one character or half of one."""

PIECE_NBYTES = 1 << 16
QUOTE, BACKSLASH = b'"', b"\\"


def first_long_text(body: bytes | bytearray, length_max: int) -> int:
    """How many characters the first string of `body` has at least that has certainly more than
    `length_max`; 0 if there is none. One without escapes is counted exactly."""
    start = body.find(QUOTE)
    while start >= 0:
        stop = body.find(QUOTE, start + 1)
        while stop >= 0 and _is_escaped(body, stop):
            stop = body.find(QUOTE, stop + 1)
        if stop < 0:
            return 0
        if stop - start - 1 > length_max:
            length = _length_min(memoryview(body)[start + 1 : stop])
            if length > length_max:
                return length
        start = body.find(QUOTE, stop + 1)
    return 0


def _length_min(text: memoryview) -> int:
    """Characters of a string as it is written in JSON: so many at least."""
    length = 0
    for start in range(0, len(text), PIECE_NBYTES):
        piece = bytes(text[start : start + PIECE_NBYTES])
        # A character that is cut in two here is not counted.
        length += len(piece.decode("utf-8", "ignore"))
        length -= ESCAPED_NBYTES_MAX * piece.count(BACKSLASH)
    return length


def _is_escaped(body: bytes | bytearray, index: int) -> bool:
    """Whether an odd number of backslashes stands before it."""
    first = index
    while body[first - 1] == BACKSLASH[0]:
        first -= 1
    return (index - first) % 2 == 1
