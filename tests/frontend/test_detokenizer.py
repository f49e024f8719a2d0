"""Text comes out piece by piece, never to be taken back, and adds up to what decoding gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.frontend.text.detokenizer import REPLACEMENT
from common.frontend.text.stop_strings import StopStrings
from common.frontend.text.tokenizer import Tokenizer
from tests.frontend.tiny_tokenizers import BACKENDS, byte_fallback_backend

TOKENIZERS = {name: Tokenizer(make(), None) for name, make in BACKENDS.items()}
BYTE_LEVEL = TOKENIZERS["byte level"]
BYTE_FALLBACK = TOKENIZERS["byte fallback"]


def pieces_of(
    tokenizer: Tokenizer, token_ids: list[int], prompt_ids: list[int], *, skips: bool = True
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt_ids, skip_special_tokens=skips)
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


def added_text(
    tokenizer: Tokenizer, token_ids: list[int], prompt_ids: list[int], *, skips: bool = True
) -> str:
    """The oracle: what decoding prompt and output has more than decoding the prompt."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skips)
    after = tokenizer.decode(prompt_ids + token_ids, skip_special_tokens=skips)
    assert after.startswith(before)
    return after[len(before) :]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_special_tokens_that_are_asked_for_are_shown_and_others_are_not(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    shown, hidden = sorted(tokenizer.special_ids)[:2]
    words = tokenizer.encode("the fox", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer([], shown_ids=frozenset({shown}))
    pieces = [detokenizer.push(i) for i in (*words, hidden, shown, *words)]
    text = "".join([*pieces, detokenizer.flush()])
    assert tokenizer.token_text(shown) in text and tokenizer.token_text(hidden) not in text


ids_strategy = st.lists(st.integers(0, 400), max_size=40)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(BACKENDS)), ids=ids_strategy, skips=st.booleans())
def test_any_tokens_add_up_to_decoding_them_at_once(name: str, ids: list[int], skips: bool) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = pieces_of(tokenizer, ids, [], skips=skips)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skips)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(BACKENDS)),
    prompt=st.text(alphabet="thefox as.é", min_size=1, max_size=12),
    ids=ids_strategy,
)
def test_the_output_is_what_it_adds_to_the_prompt(name: str, prompt: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    prompt_ids = tokenizer.encode(prompt)
    if name == "byte fallback" and any(i < 259 for i in prompt_ids[-1:]):
        return  # the prompt ends in a byte, which has no text of its own yet
    assert "".join(pieces_of(tokenizer, ids, prompt_ids)) == added_text(tokenizer, ids, prompt_ids)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), name=st.sampled_from(["byte level", "byte fallback"]))
def test_no_half_character_shows_when_the_text_is_whole(text: str, name: str) -> None:
    if REPLACEMENT in text:
        return
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(REPLACEMENT not in piece for piece in pieces_of(tokenizer, ids, [], skips=False))


def test_text_is_not_held_longer_than_its_character_needs() -> None:
    ids = BYTE_LEVEL.encode("a🚀b")
    detokenizer = BYTE_LEVEL.detokenizer([])
    shown = [detokenizer.push(i) for i in ids]
    assert shown[-1] == "b"
    assert "".join(shown[:-1]) == "a🚀"
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_shows_only_then() -> None:
    half = BYTE_LEVEL.encode("🚀")[:1]
    pieces = pieces_of(BYTE_LEVEL, half, [])
    assert pieces == ["", REPLACEMENT]


def test_a_run_of_bytes_waits_for_the_token_after_it() -> None:
    token = byte_fallback_backend().get_vocab()
    ids = [token["a"], *(token[f"<0x{byte:02X}>"] for byte in "好".encode()), token["b"]]
    assert pieces_of(BYTE_FALLBACK, ids, []) == ["a", "", "", "", "好b", ""]
    broken = [token["a"], token["<0xE5>"], token["b"]]
    assert "".join(pieces_of(BYTE_FALLBACK, broken, [])) == f"a{REPLACEMENT}b"


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    prompt_ids = BYTE_FALLBACK.encode("the")
    the = BYTE_FALLBACK.encode("the", add_special_tokens=False)
    assert "".join(pieces_of(BYTE_FALLBACK, the, prompt_ids)) == " the"
    assert "".join(pieces_of(BYTE_FALLBACK, the, [])) == "the"


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    ids = BYTE_LEVEL.encode("<think>hi<|im_end|>")
    assert "".join(pieces_of(BYTE_LEVEL, ids, [])) == "<think>hi"
    assert "".join(pieces_of(BYTE_LEVEL, ids, [], skips=False)) == "<think>hi<|im_end|>"


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_each_token_costs_the_same_however_long_the_text(name: str) -> None:
    decoded_count = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:  # type: ignore[override]
            nonlocal decoded_count
            decoded_count += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(BACKENDS[name](), None)
    detokenizer = tokenizer.detokenizer([])
    costs = []
    for _ in range(200):
        before = decoded_count
        detokenizer.push(7)
        costs.append(decoded_count - before)
    assert max(costs[100:]) <= max(costs[:100])
    assert max(costs) <= 8


# ---- stop strings --------------------------------------------------------------------------------


def cut_slowly(text: str, stops: list[str], *, keeps: bool) -> tuple[str, str | None]:
    """The oracle: the first place where a stop string is complete, and the longest that is."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[:end] if keeps else text[: end - len(longest)], longest
    return text, None


stops_strategy = st.lists(st.text(alphabet="ab c", min_size=1, max_size=5), max_size=4)
pieces_strategy = st.lists(st.text(alphabet="ab c", max_size=4), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(pieces=pieces_strategy, stops=stops_strategy, keeps=st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(
    pieces: list[str], stops: list[str], keeps: bool
) -> None:
    watcher = StopStrings(stops, keeps_match=keeps)
    shown = ""
    expected, matched = cut_slowly("".join(pieces), stops, keeps=keeps)
    for piece in pieces:
        shown += watcher.push(piece)
        assert expected.startswith(shown), "what was shown is never taken back"
        if watcher.matched:
            break
    shown += watcher.flush()
    assert (shown, watcher.matched) == (expected, matched)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(pieces=pieces_strategy, stops=stops_strategy)
def test_no_more_is_held_back_than_may_become_a_match(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    text = ""
    shown = ""
    for piece in pieces:
        text += piece
        shown += watcher.push(piece)
        if watcher.matched:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("xabc", ["bc", "abc"], "x", "abc"),
        ("aab", ["ab"], "a", "ab"),
        ("STO", ["STOP"], "STO", None),
        ("end\n\nmore", ["\n\n"], "end", "\n\n"),
    ],
)
def test_earliest_match_wins(text: str, stops: list[str], shown: str, matched: str | None) -> None:
    watcher = StopStrings(stops)
    got = ""
    for character in text:
        got += watcher.push(character)
        if watcher.matched:
            break
    assert (got + watcher.flush(), watcher.matched) == (shown, matched)


def test_a_kept_match_ends_the_text() -> None:
    watcher = StopStrings(["STOP"], keeps_match=True)
    assert watcher.push("a ST") == "a "
    assert watcher.push("OP and more") == "STOP"
    assert watcher.matched == "STOP"
