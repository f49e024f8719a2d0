"""Bodies of /generate: what is accepted becomes the right samples, all else a 400 that names it."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestError
from common.frontend.fields import NESTING_MAX, JsonObject, JsonValue, parse_object
from common.frontend.sample import Limits, TextOptions
from common.frontend.sampling import derive_seed
from common.frontend.tokenizer import Tokenizer
from common.frontend.validation import GenerateCall, parse_generate
from common.request import Bootstrap, SamplingParams
from tests.frontend.tiny_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), None)
DECODE = Limits(
    vocab_size=400,
    request_token_max=64,
    is_prefill=False,
    model_names=("tiny", "/models/tiny", "default", "unknown"),
    default_host="10.0.0.1",
    default_port=8998,
)
PREFILL = replace(DECODE, is_prefill=True)
ROOM_MAX = 2**63 - 1


def parse(limits: Limits = DECODE, /, **body: JsonValue) -> GenerateCall:
    if "text" not in body and "input_ids" not in body:
        body["text"] = "hello"
    return parse_generate(body, TOKENIZER, limits, "rid")


def sampling_of(**params: JsonValue) -> SamplingParams:
    return parse(sampling_params=dict(params)).samples[0].sampling


@pytest.mark.parametrize("timeout", [0, -1, 600.5, "1", True, [1]])
def test_a_timeout_that_can_not_be_kept_is_refused(timeout: JsonValue) -> None:
    with pytest.raises(RequestError, match=r"timeout=.*must be a finite number in \(0, 600\]"):
        parse(timeout=timeout)


# ---- what is accepted ----------------------------------------------------------------------------


def test_defaults_are_sglang_s() -> None:
    call = parse()
    (sample,) = call.samples
    assert sample.timeout_s == DECODE.request_timeout_s
    assert not call.is_list and not call.is_streaming
    assert sample.token_ids == TOKENIZER.encode("hello")
    assert sample.rid == "rid" and sample.bootstrap is None
    assert sample.text == TextOptions()
    limit = DECODE.request_token_max - len(sample.token_ids)
    assert limit < 128, "the default of 128 does not fit, and is lowered without a word"
    expected = SamplingParams(max_new_tokens=limit, seed=sample.sampling.seed)
    assert sample.sampling == expected


def test_every_option_reaches_its_place() -> None:
    params: JsonObject = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.100000023841858,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"5": -100, "399": 1.5},
        "stop": ["a", "b", "a"],
        "stop_token_ids": [7, 8, 7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": 42,
        "spaces_between_special_tokens": False,
        "stream_interval": 5,
        "custom_params": {"x": 1},
        "regex": None,
        "json_schema": None,
        "ebnf": None,
    }
    (sample,) = parse(
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[3, 4],
    ).samples
    assert sample.sampling == SamplingParams(
        max_new_tokens=7,
        seed=42,
        min_new_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.100000023841858,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={5: -100.0, 399: 1.5},
        stop_token_ids=(7, 8),
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=2,
        token_ids_logprob=(3, 4),
        logprob_start_len=1,
    )
    assert sample.text == TextOptions(("a", "b"), True, False, 2)


def test_bodies_that_routers_send_are_accepted() -> None:
    single = parse_object(
        b'{"text":"hello","model":null,"sampling_params":{"temperature":0.0,"max_new_tokens":4},'
        b'"return_text_in_logprobs":false,"stream":false,"log_metrics":true,'
        b'"return_hidden_states":false,"background":false,"no_logs":false,"return_bytes":false,'
        b'"return_entropy":false,"bootstrap_host":"127.0.0.1","bootstrap_port":8998,'
        b'"bootstrap_room":6411911426258438286}'
    )
    (sample,) = parse_generate(single, TOKENIZER, DECODE, "rid").samples
    assert sample.bootstrap == Bootstrap("127.0.0.1", 8998, 6411911426258438286)
    batch = parse_object(
        b'{"input_ids":[[5,6],[7]],"sampling_params":{},'
        b'"bootstrap_host":["127.0.0.1","127.0.0.1"],"bootstrap_port":[null,null],'
        b'"bootstrap_room":[7803954602739443409,6006083292805614411]}'
    )
    rooms = [s.bootstrap for s in parse_generate(batch, TOKENIZER, DECODE, "rid").samples]
    assert rooms == [
        Bootstrap("127.0.0.1", 8998, 7803954602739443409),
        Bootstrap("127.0.0.1", 8998, 6006083292805614411),
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {"nobody_knows": 1},
        {"priority": 3, "extra_key": "k", "custom_labels": {"a": "b"}, "conversation_id": "c"},
        {"data_parallel_rank": 0, "bootstrap_pair_key": "p", "decode_tp_size": 2},
        {"kv_transfer_params": None, "lora_path": None, "image_data": [], "session_params": {}},
        {"lora_path": [None]},
        {"model": "tiny"},
        {"model": "unknown"},
        {"rid": "mine"},
    ],
)
def test_keys_that_change_no_answer_are_let_through(extra: JsonObject) -> None:
    assert parse(**extra).samples[0].sampling.temperature == 1.0


def test_a_batch_keeps_its_order_and_its_lists() -> None:
    call = parse(
        text=["a", "bc"],
        sampling_params=[{"temperature": 0.1}, {"temperature": 0.2}],
        return_logprob=[True, False],
        logprob_start_len=[0, 0],
        top_logprobs_num=2,
        token_ids_logprob=[[1], [2]],
        rid=["x", "y"],
    )
    first, second = call.samples
    assert call.is_list
    assert [s.token_ids for s in call.samples] == [TOKENIZER.encode("a"), TOKENIZER.encode("bc")]
    assert [s.sampling.temperature for s in call.samples] == [0.1, 0.2]
    assert (first.sampling.return_logprob, second.sampling.return_logprob) == (True, False)
    assert first.sampling.token_ids_logprob == (1,)
    assert second.sampling == replace_seed(
        SamplingParams(max_new_tokens=second.sampling.max_new_tokens, seed=0, temperature=0.2),
        second.sampling.seed,
    )
    assert [s.rid for s in call.samples] == ["x", "y"]
    assert [s.index for s in call.samples] == [0, 1]


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)


def test_a_batch_of_one_is_a_batch() -> None:
    assert parse(text=["a"]).is_list
    assert parse(input_ids=[[5]]).is_list
    assert not parse(input_ids=[5]).is_list


def test_samples_of_a_prompt_have_their_own_seeds_rids_and_rooms() -> None:
    call = parse(
        text=["a", "b"],
        sampling_params={"n": 2, "sampling_seed": 5},
        rid="r",
        bootstrap_host="h",
        bootstrap_room=100,
    )
    assert call.is_list
    assert [s.rid for s in call.samples] == ["r_0", "r_1", "r_2", "r_3"]
    assert [s.bootstrap and s.bootstrap.room for s in call.samples] == [100, 101, 102, 103]
    seeds = [s.sampling.seed for s in call.samples]
    assert seeds == [5, derive_seed(5, 1), 5, derive_seed(5, 1)]
    assert [s.token_ids for s in call.samples[1:3]] == [TOKENIZER.encode(x) for x in "ab"]
    named = parse(text=["a", "b"], sampling_params={"n": 2}, rid=["x", "y"])
    assert [s.rid for s in named.samples] == ["x_0", "x_1", "y_0", "y_1"]


def test_without_a_seed_every_sample_draws_its_own() -> None:
    seeds = {s.sampling.seed for s in parse(sampling_params={"n": 64}).samples}
    assert len(seeds) == 64
    assert seeds.isdisjoint({s.sampling.seed for s in parse(sampling_params={"n": 64}).samples})


@settings(deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
def test_every_seed_fits_the_engine(seed: int, index: int) -> None:
    got = derive_seed(sampling_of(sampling_seed=seed).seed, index)
    assert 0 <= got < 2**63


def test_a_small_temperature_is_greedy() -> None:
    assert sampling_of(temperature=0).temperature == 0.0
    assert sampling_of(temperature=1e-7).temperature == 0.0
    assert sampling_of(temperature=1e-6).temperature == 1e-6


def test_more_log_probabilities_than_a_message_takes_are_refused() -> None:
    long = replace(DECODE, request_token_max=100_000)
    asked: JsonObject = {"return_logprob": True, "top_logprobs_num": 128, "input_ids": [5] * 25_000}
    parse(long, text=None, logprob_start_len=0, **asked)
    parse(long, text=None, logprob_start_len=-1, sampling_params={"n": 128}, **asked)
    for extra in ({"token_ids_logprob": [1, 2, 3, 4, 5]}, {"sampling_params": {"n": 2}}):
        with pytest.raises(RequestError, match="at most 50331648 are told") as caught:
            parse(long, text=None, logprob_start_len=0, **asked, **extra)
        assert (caught.value.field, caught.value.status) == ("logprob_start_len", 400)


def test_max_new_tokens_fills_the_context_if_null_and_may_be_zero() -> None:
    prompt = TOKENIZER.encode("hello")
    assert sampling_of(max_new_tokens=None).max_new_tokens == 64 - len(prompt)
    exact = 64 - len(prompt)
    assert sampling_of(max_new_tokens=exact).max_new_tokens == exact
    (sample,) = parse(sampling_params={"max_new_tokens": 0}).samples
    assert sample.hides_output and sample.sampling.max_new_tokens == 1


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    (sample,) = parse(input_ids=[5] * 63).samples
    assert sample.sampling.max_new_tokens == 1


# ---- rooms ---------------------------------------------------------------------------------------


def test_a_room_without_an_address_is_on_the_one_prefill_server() -> None:
    assert parse(bootstrap_room=0).samples[0].bootstrap == Bootstrap("10.0.0.1", 8998, 0)
    with pytest.raises(RequestError, match="bootstrap_host"):
        parse(replace(DECODE, default_host=""), bootstrap_room=0)


def test_rooms_of_prompts_count_up_over_their_samples() -> None:
    """What a router sends for several samples of each of several prompts."""
    body: JsonObject = {"text": ["a", "b"], "sampling_params": {"n": 2}}
    samples = parse(
        **body, bootstrap_room=[100, 70], bootstrap_host=["10.0.0.1", "10.0.0.2"]
    ).samples
    places = [sample.bootstrap for sample in samples]
    assert [(place.host, place.room) for place in places if place is not None] == [
        *(("10.0.0.1", 100), ("10.0.0.1", 101)),
        *(("10.0.0.2", 70), ("10.0.0.2", 71)),
    ]


def test_the_largest_room_is_exact() -> None:
    body = parse_object(json.dumps({"text": "a", "bootstrap_room": ROOM_MAX}).encode())
    (sample,) = parse_generate(body, TOKENIZER, DECODE, "rid").samples
    assert sample.bootstrap is not None and sample.bootstrap.room == ROOM_MAX


TWICE: JsonObject = {"text": ["a", "b"], "sampling_params": {"n": 2}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": ROOM_MAX + 1}, "bootstrap_room"),
        ({"bootstrap_room": 2**70}, "bootstrap_room"),
        ({"bootstrap_room": 1.0}, "bootstrap_room"),
        ({"bootstrap_room": "1"}, "bootstrap_room"),
        ({"bootstrap_room": True}, "bootstrap_room"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
        ({"text": ["a", "b"], "bootstrap_room": [1]}, "bootstrap_room"),
        ({"text": ["a", "b"], "bootstrap_room": [1, None]}, "bootstrap_room"),
        ({"text": ["a", "b"], "bootstrap_room": [1, 1]}, "bootstrap_room"),
        ({"text": ["a", "b"], "bootstrap_room": ROOM_MAX}, "bootstrap_room"),
        (
            {"text": ["a", "b"], "sampling_params": {"n": 2}, "bootstrap_room": [1]},
            "bootstrap_room",
        ),
        (
            {"text": ["a", "b"], "sampling_params": {"n": 2}, "bootstrap_room": [1, 2]},
            "bootstrap_room",
        ),
        ({"bootstrap_host": "h"}, "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_host": 5}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": ["a", "b"]}, "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_room": 1, "bootstrap_port": 65536}, "bootstrap_port"),
        ({"bootstrap_room": 1, "bootstrap_port": "8998"}, "bootstrap_port"),
    ],
)
def test_a_wrong_room_is_refused(body: JsonObject, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.field == field and caught.value.status == 400


def test_a_prefill_server_refuses_what_has_no_room() -> None:
    for extra in ({}, {"bootstrap_room": None}, {"text": ["a"], "bootstrap_room": [None]}):
        with pytest.raises(RequestError, match="decode server") as caught:
            parse(PREFILL, **extra)
        assert caught.value.field == "bootstrap_room" and caught.value.status == 400


def test_a_prefill_server_answers_one_token_whatever_is_asked() -> None:
    for params in ({}, {"max_new_tokens": 10**6}, {"max_new_tokens": 1, "min_new_tokens": 5}):
        (sample,) = parse(PREFILL, bootstrap_room=1, sampling_params=dict(params)).samples
        assert sample.sampling.max_new_tokens == 1
        assert sample.sampling.min_new_tokens == min(1, params.get("min_new_tokens", 0))


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
    ("stop_token_ids", [400]),
    ("stop_token_ids", [-1]),
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
    ("stop_regex", "a+"),
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
    [b"", b"{", b"nope", b"{'text': 1}", b'{"text": "a"} x', b"\xff\xfe", b'{"a": "\\ud800"}'],
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
