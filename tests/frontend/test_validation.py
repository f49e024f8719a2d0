"""Bodies of /generate: what is accepted becomes the right samples."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object
from common.frontend.bodies.sample import Limits, TextOptions
from common.frontend.bodies.sampling import derive_seed
from common.frontend.bodies.validation import GenerateCall, parse_generate
from common.frontend.text.tokenizer import Tokenizer
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


def test_samples_of_a_prompt_have_their_own_seeds_and_rids_and_share_a_room() -> None:
    call = parse(
        text=["a", "b"],
        sampling_params={"n": 2, "sampling_seed": 5},
        rid="r",
        bootstrap_host="h",
        bootstrap_room=100,
    )
    assert call.is_list
    assert [s.rid for s in call.samples] == ["r_0", "r_1", "r_2", "r_3"]
    assert [s.bootstrap and s.bootstrap.room for s in call.samples] == [100, 100, 101, 101]
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


def test_each_prompt_has_a_room_for_all_of_its_samples() -> None:
    """What a router sends for several samples of each of several prompts."""
    body: JsonObject = {"text": ["a", "b"], "sampling_params": {"n": 2}}
    samples = parse(
        **body, bootstrap_room=[100, 70], bootstrap_host=["10.0.0.1", "10.0.0.2"]
    ).samples
    places = [sample.bootstrap for sample in samples]
    assert [(place.host, place.room) for place in places if place is not None] == [
        *(("10.0.0.1", 100), ("10.0.0.1", 100)),
        *(("10.0.0.2", 70), ("10.0.0.2", 70)),
    ]


def test_a_list_may_name_a_room_for_every_sample() -> None:
    given = [4, 4, 6, 7]
    samples = parse(**TWICE, bootstrap_room=given).samples
    assert [sample.bootstrap and sample.bootstrap.room for sample in samples] == given


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
            {"text": ["a", "b"], "sampling_params": {"n": 2}, "bootstrap_room": [1, 1, 1, 2]},
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
