"""Texts that are too long for any prompt are found in a body before it is parsed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from common.frontend.bodies.fields import JsonValue
from common.frontend.bodies.long_texts import first_long_text

TEXTS = st.text(alphabet=st.sampled_from('a"\\\né€𝄞 '), max_size=40)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


def texts(value: JsonValue) -> list[str]:
    """Every string in a value, keys included."""
    match value:
        case str():
            return [value]
        case list():
            return [text for item in value for text in texts(item)]
        case dict():
            return [*value, *texts([*value.values()])]
        case _:
            return []


def plain_texts(value: JsonValue) -> list[str]:
    """Those that JSON writes as they are."""
    return [text for text in texts(value) if json.dumps(text) == f'"{text}"']


@given(VALUES, st.integers(0, 12), st.booleans())
def test_only_what_is_longer_is_found_and_no_plain_text_is_missed(
    value: JsonValue, length_max: int, is_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    longest = max(map(len, texts(value)), default=0)
    found = first_long_text(body, length_max)
    if found:
        assert length_max < found <= longest
    else:
        assert all(len(text) <= length_max for text in plain_texts(value))


@given(st.binary(max_size=60).map(lambda noise: b'"' + noise + b'\\"'))
def test_what_is_no_json_is_left_to_the_parser(noise: bytes) -> None:
    assert 0 <= first_long_text(noise, 2) <= len(noise)
