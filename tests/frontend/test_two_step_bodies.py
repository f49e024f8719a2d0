"""Bodies of proxies that ask the prefill server first: what it says of what it holds, and what a
decode server makes of that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import RequestError
from common.frontend.apis.openai_api import parse_completion
from common.frontend.bodies.dial_rules import DialRules
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.frontend.text.tokenizer import Tokenizer
from common.request import Bootstrap
from tests.frontend.tiny_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), None)
DECODE = Limits(
    vocab_size=400,
    request_token_max=64,
    is_prefill=False,
    model_names=("tiny",),
    dial_rules=DialRules(("any",), ()),
)
PREFILL = replace(
    DECODE,
    is_prefill=True,
    default_port=8998,
    dial_rules=None,
    engine="incarnation",
    named_host="prefill.svc",
)
# As vLLM's proxy and llm-d's sidecar send them.
FIRST: JsonObject = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SECOND: JsonObject = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "incarnation",
    "remote_request_id": "9007199254740993",
    "remote_host": "prefill.svc",
    "remote_port": 8998,
    "remote_block_ids": [],
}


def places_of(limits: Limits, params: JsonValue, **body: JsonValue) -> list[Bootstrap | None]:
    whole: JsonObject = {"prompt": "hello", "kv_transfer_params": params, **body}
    call, _ = parse_completion(whole, TOKENIZER, limits, "name")
    return [sample.bootstrap for sample in call.samples]


def test_what_a_prefill_server_says_is_what_a_decode_server_reads() -> None:
    body: JsonObject = {"prompt": ["a", "b"], "n": 2, "kv_transfer_params": FIRST, "max_tokens": 1}
    call, _ = parse_completion(body, TOKENIZER, PREFILL, "name")
    held = [sample.bootstrap for sample in call.samples]
    assert call.transfer_params is not None
    passed_on = {key: value for key, value in call.transfer_params.items() if key != "n"}
    assert places_of(DECODE, passed_on, prompt=["a", "b"], n=2) == held
    assert [(place.host, place.port, place.engine) for place in held if place is not None] == [
        ("prefill.svc", 8998, "incarnation")
    ] * 4
    assert len({place.room for place in held if place is not None}) == 2, "one for each prompt"


def test_rooms_pass_through_floats_unharmed() -> None:
    """A proxy that reads numbers as floats, as one in Go may, keeps 53 bits of them."""
    call, _ = parse_completion(
        {"prompt": "a", "kv_transfer_params": FIRST}, TOKENIZER, PREFILL, "name"
    )
    assert call.transfer_params is not None
    numbers = [v for v in call.transfer_params.values() if isinstance(v, int)]
    assert all(int(float(number)) == number for number in numbers)
    assert places_of(DECODE, SECOND) == [
        Bootstrap("prefill.svc", 8998, 9007199254740993, "incarnation")
    ]


def test_more_tokens_asked_for_than_the_one_of_the_first_step_are_no_error() -> None:
    assert len(places_of(PREFILL, FIRST, max_tokens=1, min_tokens=5)) == 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_without_a_wish_a_decode_server_does_all_itself(params: JsonValue) -> None:
    assert places_of(DECODE, params) == [None]


def test_a_host_that_may_not_be_dialled_is_left_to_those_that_are_connected() -> None:
    limits = replace(DECODE, dial_rules=DialRules(("10.0.0.0/8",), ()))
    assert places_of(limits, SECOND) == [Bootstrap("", 8998, 9007199254740993, "incarnation")]


@pytest.mark.parametrize(
    ("limits", "params", "field"),
    [
        (DECODE, FIRST, "do_remote_decode"),
        (PREFILL, SECOND, "do_remote_prefill"),
        (DECODE, SECOND | {"do_remote_decode": True}, "do_remote_decode"),
        (DECODE, SECOND | {"do_remote_prefill": 1}, "do_remote_prefill"),
        (DECODE, SECOND | {"remote_engine_id": None}, "remote_engine_id"),
        (DECODE, SECOND | {"remote_engine_id": 5}, "remote_engine_id"),
        (DECODE, SECOND | {"remote_request_id": None}, "remote_request_id"),
        (DECODE, SECOND | {"remote_request_id": "cmpl-1"}, "remote_request_id"),
        (DECODE, SECOND | {"remote_request_id": "9" * 19}, "remote_request_id"),
        (DECODE, SECOND | {"remote_request_id": "9" * 5000}, "remote_request_id"),
        (DECODE, SECOND | {"remote_port": 0}, "remote_port"),
        (DECODE, SECOND | {"remote_host": ["a"]}, "remote_host"),
        (DECODE, SECOND | {"remote_host": "two words"}, "remote_host"),
        (DECODE, {"remote_host": 0.0}, "remote_host"),
        (PREFILL, FIRST | {"remote_port": "8998"}, "remote_port"),
    ],
)
def test_a_wrong_wish_is_refused(limits: Limits, params: JsonObject, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        places_of(limits, params)
    assert (caught.value.status, caught.value.field) == (400, f"kv_transfer_params.{field}")


def test_a_room_beside_it_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        places_of(DECODE, SECOND, bootstrap_room=1)
    assert (caught.value.status, caught.value.field) == (400, "bootstrap_room")
