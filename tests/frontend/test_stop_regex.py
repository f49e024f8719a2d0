"""SGLang's stop_regex: an output ends with the token that completes a match."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.config import Role
from common.errors import GrammarError
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.grammar import RegexWatch
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    post,
    post_object,
    post_stream,
    run_generate,
    say_text,
)

PATTERNS = [
    "b", "ab", "(a|b)c", "[ab]{2}c", "a+b", "é", "a.c", "(?i)AB", r"\d+", "b$", "(ab)+c", "[^a]c"
]  # fmt: skip


def slow_end(pattern: str, pieces: list[str]) -> int | None:
    """SGLang's rule: after each token the text so far is searched."""
    for count in range(1, len(pieces) + 1):
        if re.search(pattern, "".join(pieces[:count])):
            return count
    return None


@settings(max_examples=300, deadline=None)
@example("a.c", ["a\nc"])
@given(st.sampled_from(PATTERNS), st.lists(st.text("abcé1B\n", max_size=4), max_size=12))
def test_a_match_is_found_with_the_piece_that_completes_it(pattern: str, pieces: list[str]) -> None:
    watch = RegexWatch.of(pattern).copy()
    if pattern.endswith("$"):
        # A text may end with any of its characters, as pieces may be longer than tokens.
        pieces = [*"".join(pieces).replace("\n", "")]
    found = next((i for i, piece in enumerate(pieces, 1) if watch.push(piece)), None)
    assert found == slow_end(pattern, pieces)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a", "unclosed group"),
        ("a)|(?:b", "unopened group"),
        ("(?=a)b", "look-ahead"),
        (r"(a)\1", "backreferences are not supported"),
        ("a*", "matches the empty text"),
        ("|a", "matches the empty text"),
    ],
)
def test_what_can_not_be_looked_for_is_refused_with_the_reason(pattern: str, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        RegexWatch.of(pattern)


def test_an_expression_that_backtracks_elsewhere_costs_no_more_than_others() -> None:
    watch = RegexWatch.of("(x+x+)+y")
    assert not watch.push("x" * 5000)  # Python's `re` would take longer than there is time
    assert watch.push("y")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "stop_regex"),
        ("/v1/chat/completions", "stop_regex"),
        ("/generate", "sampling_params.stop_regex"),
    ],
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_the_match_stays_in_the_text_and_is_named(
    path: str, field: str, is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("call 555-1234 or 555-9876 now")
        body = asked(path, [r"never", r"\d{3}-\d{4}"])
        text, matched = await said(rig, path, body, is_streaming=is_streaming)
        assert text == "call 555-1234" and matched == r"\d{3}-\d{4}"
        refused = asked(path, "(a")
        reply = await post(rig, path, refused, 400)
        message = at(reply, "error", "message")
        assert str(message).startswith(f"{field}='(a': ")

    run_generate(tmp_path, story)


def asked(path: str, regex: JsonValue, **options: JsonValue) -> JsonObject:
    if path == "/generate":
        sampling: JsonObject = {"stop_regex": regex, "max_new_tokens": 200, **options}
        return {"text": "a", "sampling_params": sampling}
    prompt: JsonObject = {"prompt": "a"}
    if path == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": "a"}]}
    return {**prompt, "stop_regex": regex, "max_tokens": 200, **options}


async def said(rig: Rig, path: str, body: JsonObject, *, is_streaming: bool) -> tuple[str, object]:
    """The whole text, and what ended it."""
    events = await post_stream(rig, path, body) if is_streaming else []
    if not is_streaming:
        events = [await post_object(rig, path, body)]
    if path == "/generate":
        return str(events[-1]["text"]), at(events[-1], "meta_info", "finish_reason", "matched")
    choices = [at(event, "choices", 0) for event in events]
    text = ""
    for choice in choices:
        assert isinstance(choice, dict)
        part = choice.get("message") or choice.get("delta") or choice
        text += str(part.get("content", part.get("text")) or "")
    return text, at(choices[-1], "matched_stop")


def test_it_is_looked_for_behind_the_tokens_that_must_come(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        text = "a1 b2 c3 d4"
        rig.scheduler.answer = say_text(text)
        count = len(TOKENIZER.encode("a1 b"))
        body = asked("/generate", r"\d", min_new_tokens=count)
        assert await said(rig, "/generate", body, is_streaming=False) == ("a1 b2", r"\d")

    run_generate(tmp_path, story)


def test_a_stop_string_that_comes_first_goes_first(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("one STOP two 22")
        body = asked("/v1/completions", r"\d", stop="STOP")
        text, matched = await said(rig, "/v1/completions", body, is_streaming=False)
        assert (text, matched) == ("one ", "STOP")
        body = asked("/v1/completions", "n", stop="nevertheless")
        text, matched = await said(rig, "/v1/completions", body, is_streaming=True)
        assert matched == "n" and text.startswith("on"), "what was held back for a string is shown"

    run_generate(tmp_path, story)


def test_a_prefill_server_takes_it_too(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body = {**asked("/generate", r"\d"), "bootstrap_room": 5}
        await post(rig, "/generate", body)

    run_generate(tmp_path, story, role=Role.PREFILL)
