"""Bodies of /generate that are refused: every answer is a 400 that names the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestError
from common.frontend.bodies.fields import NESTING_MAX, JsonObject, JsonValue, parse_object
from common.frontend.bodies.validation import parse_generate
from tests.frontend.test_validation import DECODE, PREFILL, TOKENIZER, parse

# ---- bad input -----------------------------------------------------------------------------------

NOT_NUMBERS: list[JsonValue] = [True, "1", [], {}, [1.0]]
OUT_OF_RANGE: dict[str, list[JsonValue]] = {
    "temperature": [-0.1, -1, 1e39, 10**400],
    "top_p": [0, -0.1, 1.0001, 2],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "top_k": [0, -2, 2**31, 1.5, 2**70],
    "max_new_tokens": [-1, 65, 1.5, 2**70],
    "min_new_tokens": [-1, 129, 1.5],
    "n": [0, -1, 129, 1.5],
    "sampling_seed": [2**63, -(2**63) - 1, 1.5],
    "seed": [2**63, 1.5],
    "stream_interval": [0, -1, 1.5],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, v) for key, values in OUT_OF_RANGE.items() for v in [*values, *NOT_NUMBERS]],
)
def test_a_number_out_of_range_is_named(key: str, value: JsonValue) -> None:
    with pytest.raises(RequestError) as caught:
        parse(sampling_params={key: value})
    assert caught.value.status == 400
    assert caught.value.field == f"sampling_params.{key}"
    assert f"sampling_params.{key}=" in caught.value.message
    assert "must be" in caught.value.message


@pytest.mark.parametrize("key", [key for key in OUT_OF_RANGE if key != "n"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_named(key: str, literal: str) -> None:
    body = f'{{"text": "a", "sampling_params": {{"{key}": {literal}}}}}'
    with pytest.raises(RequestError, match="must be a finite number") as caught:
        parse_object(body.encode())
    assert caught.value.field == f"sampling_params.{key}"


@pytest.mark.parametrize(
    "key", ["ignore_eos", "skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"]
)
@pytest.mark.parametrize("value", [1, 0, "true", [], {}, 0.5])
def test_a_flag_must_be_true_or_false(key: str, value: JsonValue) -> None:
    with pytest.raises(RequestError, match="must be true or false") as caught:
        parse(sampling_params={key: value})
    assert caught.value.field == f"sampling_params.{key}"


BAD_PARAMS: list[tuple[str, JsonValue]] = [
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", {}),
    ("stop", "x" * 1025),
    ("stop", [str(i) for i in range(65)]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [None]),
    ("stop_token_ids", [1] * 1025),
    ("logit_bias", []),
    ("logit_bias", {"400": 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"٣": 1.0}),
    ("logit_bias", {"9" * 5000: 1.0}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": 1e39}),
    ("logit_bias", {str(i): 0.0 for i in range(4097)}),
    ("custom_params", [1]),
    ("json_schema", "{}x"),
    ("regex", 5),
    ("ebnf", "root ::= 'a'"),
    ("structural_tag", "{}x"),
    ("stop_regex", 5),
    ("stop_regex", ""),
    ("stop_regex", ["a"] * 9),
    ("temprature", 1.0),
    ("max_tokens", 5),
]


@pytest.mark.parametrize(("key", "value"), BAD_PARAMS)
def test_a_wrong_sampling_option_is_named(key: str, value: JsonValue) -> None:
    with pytest.raises(RequestError) as caught:
        parse(sampling_params={key: value})
    assert caught.value.status == 400
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"sampling_params.{key}")
    assert len(caught.value.message) < 1000, "a message does not repeat a whole body"


BAD_BODIES: list[tuple[JsonObject, str]] = [
    ({"text": ""}, "text"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"text": []}, "text"),
    ({"text": 5}, "text"),
    ({"text": True}, "text"),
    ({"text": {"a": 1}}, "text"),
    ({"text": ["a", None]}, "text[1]"),
    ({"text": ["a", ["b"]]}, "text[1]"),
    ({"text": "a", "input_ids": [1]}, "input_ids"),
    ({"text": None}, "text"),
    ({"text": None, "input_ids": None}, "text"),
    ({"prompt": "a", "text": None}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids[0]"),
    ({"input_ids": [[5], []]}, "input_ids[1]"),
    ({"input_ids": "5"}, "input_ids"),
    ({"input_ids": 5}, "input_ids"),
    ({"input_ids": [400]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [5, True]}, "input_ids"),
    ({"input_ids": [5, 1.0]}, "input_ids"),
    ({"input_ids": [5, None]}, "input_ids"),
    ({"input_ids": [5, [6]]}, "input_ids"),
    ({"input_ids": [[5], 6]}, "input_ids[1]"),
    ({"input_ids": [[5], [2**70]]}, "input_ids[1]"),
    ({"input_ids": [5] * 64}, "input_ids"),
    ({"text": "word " * 64}, "text"),
    ({"text": ["a"] * 4097}, ""),
    ({"text": ["a"] * 64, "sampling_params": {"n": 128}}, ""),
    ({"sampling_params": []}, "sampling_params"),
    ({"sampling_params": "x"}, "sampling_params"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, 5]}, "sampling_params[1]"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]}, "sampling_params[1].top_p"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}},
     "sampling_params.min_new_tokens"),
    ({"sampling_params": {"max_new_tokens": None, "min_new_tokens": 65}},
     "sampling_params.min_new_tokens"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"return_logprob": 1}, "return_logprob"),
    ({"return_logprob": [True, True]}, "return_logprob"),
    ({"logprob_start_len": -2}, "logprob_start_len"),
    ({"logprob_start_len": 99}, "logprob_start_len"),
    ({"logprob_start_len": True}, "logprob_start_len"),
    ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ({"top_logprobs_num": 129}, "top_logprobs_num"),
    ({"token_ids_logprob": 5}, "token_ids_logprob"),
    ({"token_ids_logprob": [400]}, "token_ids_logprob"),
    ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ({"return_text_in_logprobs": 1}, "return_text_in_logprobs"),
    ({"rid": 5}, "rid"),
    ({"rid": ""}, "rid"),
    ({"rid": "x" * 257}, "rid"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"rid": []}, "rid"),
    ({"text": ["a", "b"], "rid": ["a", "a"]}, "rid"),
    ({"model": 5}, "model"),
    ({"image_data": "x"}, "image_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"lora_path": ["x", None]}, "lora_path"),
    ({"input_embeds": [[0.5]]}, "input_embeds"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"session_params": {"id": "x"}}, "session_params"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), BAD_BODIES)
def test_a_wrong_body_is_named(body: JsonObject, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert (caught.value.field or "") == field
    assert field in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_model_that_is_not_served_is_not_found() -> None:
    with pytest.raises(RequestError, match="'tiny'") as caught:
        parse(model="gpt-4")
    assert caught.value.status == 404 and caught.value.field == "model"


def test_a_text_whose_tokens_the_model_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match=r"the model has tokens 0\.\.49"):
        parse(replace(DECODE, vocab_size=50), text="hello")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"nope", b"{'text': 1}", b'{"text": "a"} x', b"\xff\xfe", b'{"a": "\\ud800"}'),
        *(b'{"a": "\x80"}', b'{"\x80": 1}', b'{"a": "\xed\xa0\x80"}'),
    ],
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse_object(body)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"true"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_object(body)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000])
def test_a_body_nested_too_deeply_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="too deeply"):
        parse_object(body)


def test_a_body_may_be_nested_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    wide = b'{"a": [' + b",".join([b"[1]"] * (2 * NESTING_MAX)) + b"]}"
    assert len(parse_object(wide)) == len(parse_object(nested(NESTING_MAX))) == 1
    with pytest.raises(RequestError, match=f"at most {NESTING_MAX} levels"):
        parse_object(nested(NESTING_MAX + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
TOP_KEYS = sorted({key for body, _ in BAD_BODIES for key in body} | {"bootstrap_room"})
PARAM_KEYS = sorted({*OUT_OF_RANGE, *(key for key, _ in BAD_PARAMS), "ignore_eos"})


@pytest.mark.slow
@settings(deadline=None)
@given(
    body=st.dictionaries(st.sampled_from(TOP_KEYS), json_values, max_size=4),
    params=st.dictionaries(st.sampled_from(PARAM_KEYS), json_values, max_size=3),
)
def test_no_body_gets_anything_but_samples_or_a_request_error(
    body: JsonObject, params: JsonObject
) -> None:
    body = {"sampling_params": params, **body}
    for limits in (DECODE, PREFILL):
        try:
            call = parse_generate(dict(body), TOKENIZER, limits, "rid")
        except RequestError as error:
            assert error.status in (400, 404) and error.message
            continue
        for sample in call.samples:
            assert 1 <= len(sample.token_ids) < limits.request_token_max
            assert all(0 <= i < limits.vocab_size for i in sample.token_ids)
            total = len(sample.token_ids) + sample.sampling.max_new_tokens
            assert total <= limits.request_token_max
