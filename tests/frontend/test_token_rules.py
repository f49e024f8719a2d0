"""Fields that name tokens: what vLLM's clients send becomes what its engine would draw by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import RequestError
from common.frontend.apis.openai_api import parse_completion
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.frontend.text.tokenizer import Tokenizer
from common.request import SamplingParams
from tests.frontend.tiny_tokenizers import byte_fallback_backend, byte_level_backend

LEVEL = Tokenizer(byte_level_backend(), None)
FALLBACK = Tokenizer(byte_fallback_backend(), None)
LIMITS = Limits(400, 64, is_prefill=False, model_names=("tiny",))


def sampling_of(tokenizer: Tokenizer = LEVEL, /, **fields: JsonValue) -> SamplingParams:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    body: JsonObject = {"prompt": "hello", **fields}
    call, _ = parse_completion(body, tokenizer, replace(LIMITS, encode=encode), "name")
    return call.samples[0].sampling


def vllm_words(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """`SamplingParams.update_from_tokenizer` of vLLM 0.33, read again."""
    words: list[list[int]] = []
    for text in texts:
        for prefix in ("", " "):
            ids = tokenizer.encode(prefix + text.lstrip(), add_special_tokens=False)
            if not prefix or (ids[0] != words[-1][0] and len(ids) == len(words[-1])):
                words.append(ids)
    return words


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK])
@pytest.mark.parametrize(
    "texts", [["the"], [" the"], ["lazy dog"], ["a", "hello", "Zürich"], ["the", "\n the end"]]
)
def test_bad_words_are_the_tokens_that_vllm_makes_of_them(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    found = sampling_of(tokenizer, bad_words=[*texts]).bad_words
    assert [*found] == [tuple(word) for word in vllm_words(tokenizer, texts)]


def test_the_same_word_twice_is_one() -> None:
    once = sampling_of(bad_words=["the", "hello"]).bad_words
    assert sampling_of(bad_words=["the", "hello", " the", "the"]).bad_words == once


def test_allowed_token_ids_are_a_set() -> None:
    assert sampling_of(allowed_token_ids=[7, 0, 7, 399]).allowed_token_ids == (0, 7, 399)
    assert sampling_of(allowed_token_ids=None).allowed_token_ids == ()


def test_a_stop_token_outside_the_vocabulary_ends_nothing() -> None:
    """vLLM and SGLang take any; a client may send those of another model."""
    assert sampling_of(stop_token_ids=[5, 400, 5, 2**70, -1]).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("allowed_token_ids", [], "must be a list of 1..262144 token ids"),
        ("allowed_token_ids", [0, 400], r"allowed_token_ids\[1\]=400"),
        ("allowed_token_ids", [False], r"allowed_token_ids\[0\]=false"),
        ("bad_words", "the", "bad_words="),
        ("bad_words", [""], "bad_words="),
        ("bad_words", ["the", "  "], r'bad_words\[1\]="  ": must be a text that is not blank'),
        ("bad_words", ["the " * 65], r"bad_words\[0\]: has \d+ tokens; must have 1..64"),
        ("bad_words", [f"{i}" for i in range(1025)], "bad_words="),
        (
            "bad_words",
            [f"{i:03}" for i in range(1024)],
            r"bad_words: \d+ sequences of tokens; at most 1024",
        ),
        ("stop_token_ids", ["5"], r'stop_token_ids\[0\]="5": must be an integer'),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(
    field: str, value: JsonValue, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        sampling_of(**{field: value})
    assert caught.value.field is not None and caught.value.field.startswith(field)
