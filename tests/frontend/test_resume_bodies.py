"""Bodies of /resume: what one frontend writes another one reads, and nothing else goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue, parse_object
from common.frontend.bodies.resume import parse_resume, resume_body
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.sampling import GREEDY_BELOW
from common.prefix_digests import extend_digests, prefix_seed
from common.protocol.codec import encode
from common.protocol.frontend import Submit
from common.protocol.sampling_bounds import check_sampling_params
from common.request import Grammar, GrammarKind, SamplingParams
from common.request_bounds import FLOAT32_MAX, SEED_MAX

FINGERPRINT = {"model": "tiny"}
LIMITS = Limits(
    vocab_size=320,
    request_token_max=512,
    is_prefill=False,
    model_names=("tiny",),
    prefix_fingerprint=FINGERPRINT,
    request_timeout_s=60.0,
)
TOKENS = st.integers(0, 319)


def floats(low: float, high: float, *, excludes_low: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=excludes_low, allow_nan=False)


@st.composite
def samplings(draw: st.DrawFn, prompt_count: int, output_count: int) -> SamplingParams:
    room = 512 - prompt_count
    max_new_tokens = draw(st.integers(output_count + 1, room))
    tells = draw(st.booleans())
    start = draw(st.integers(-1, prompt_count)) if tells and not output_count else -1
    grammar = draw(st.sampled_from([None, *GrammarKind]))
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=draw(st.integers(0, SEED_MAX)),
        min_new_tokens=draw(st.integers(0, max_new_tokens)),
        temperature=draw(st.just(0.0) | floats(GREEDY_BELOW, FLOAT32_MAX)),
        top_k=draw(st.just(-1) | st.integers(1, 2**31 - 1)),
        top_p=draw(floats(0.0, 1.0, excludes_low=True)),
        min_p=draw(floats(0.0, 1.0)),
        repetition_penalty=draw(floats(0.0, 2.0, excludes_low=True)),
        presence_penalty=draw(floats(-2.0, 2.0)),
        frequency_penalty=draw(floats(-2.0, 2.0)),
        logit_bias=draw(st.dictionaries(TOKENS, floats(-FLOAT32_MAX, FLOAT32_MAX), max_size=4)),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=4, unique=True))),
        ignore_eos=draw(st.booleans()),
        return_logprob=tells,
        top_logprobs_num=draw(st.integers(0, 128)) if tells else 0,
        token_ids_logprob=tuple(draw(st.lists(TOKENS, max_size=4, unique=True))) if tells else (),
        logprob_start_len=start,
        allowed_token_ids=tuple(sorted(draw(st.sets(TOKENS, max_size=4)))),
        bad_words=tuple(
            map(tuple, draw(st.lists(st.lists(TOKENS, min_size=1, max_size=64), max_size=3)))
        ),
        grammar=None if grammar is None else Grammar(grammar, draw(st.text(min_size=1))),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_one_server_writes_another_one_reads(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=40))
    outputs = data.draw(st.lists(TOKENS, max_size=20))
    sampling = data.draw(samplings(len(prompt), len(outputs)))
    digests = extend_digests(prefix_seed(FINGERPRINT, data.draw(st.text(max_size=4))), prompt)

    body = parse_object(
        msgspec.json.encode(resume_body("r", prompt, outputs, sampling, 12.5, digests))
    )
    sample = parse_resume(body, LIMITS)
    assert sample.sampling == sampling
    assert (sample.rid, sample.token_ids, sample.output_ids) == ("r", prompt, outputs)
    assert sample.timeout_s == 12.5 and sample.prefix_digests == digests


def test_a_server_that_keeps_no_prefixes_makes_no_digests() -> None:
    digests = extend_digests(prefix_seed(FINGERPRINT), [5] * 40)
    body = resume_body("r", [5] * 40, [], SamplingParams(max_new_tokens=3, seed=1), 1.0, digests)
    assert parse_resume(body, replace(LIMITS, prefix_fingerprint=None)).prefix_digests == b""


def test_it_has_no_more_time_than_this_server_gives() -> None:
    body = resume_body("r", [5], [], SamplingParams(max_new_tokens=3, seed=1), 1e4, b"")
    assert parse_resume(body, LIMITS).timeout_s == 60.0


def good() -> JsonObject:
    sampling = SamplingParams(max_new_tokens=9, seed=3, stop_token_ids=(4,), logit_bias={5: 1.0})
    return resume_body("r", [5, 6], [7, 8], sampling, 30.0, b"")


def with_sampling(name: str, value: JsonValue) -> Callable[[JsonObject], None]:
    def change(body: JsonObject) -> None:
        options = body["sampling_params"]
        assert isinstance(options, dict)
        options[name] = value

    return change


def with_field(name: str, value: JsonValue) -> Callable[[JsonObject], None]:
    return lambda body: body.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_field("rid", ""), "rid"),
        (with_field("rid", None), "rid"),
        (with_field("rid", "x" * 400), "rid"),
        (with_field("token_ids", None), "token_ids"),
        (with_field("token_ids", []), "the prompt is empty"),
        (with_field("token_ids", "five"), "token_ids"),
        (with_field("token_ids", [1] * 512), "at most 511"),
        (with_field("token_ids", [320]), "token_ids[0]=320: must be a token id in 0..319"),
        (with_field("token_ids", [True]), "token_ids[0]=true"),
        (with_field("output_ids", [-1]), "output_ids[0]=-1"),
        (with_field("output_ids", [1.5]), "output_ids[0]=1.5"),
        (with_field("output_ids", 7), "output_ids"),
        (with_field("output_ids", [1] * 9), "output_ids: 9 tokens; must be fewer than"),
        (with_field("timeout", 0), "timeout"),
        (with_field("timeout", 1e9), "timeout"),
        (with_field("timeout", "60"), "timeout"),
        (with_field("timeout", None), "timeout"),
        (with_field("prefix_seed", "xyz"), "prefix_seed"),
        (with_field("prefix_seed", "ab"), "prefix_seed"),
        (with_field("sampling_params", [1]), "sampling_params"),
        (with_field("sampling_params", {}), "seed"),
        (with_field("grammar", "a+"), "grammar"),
        (with_field("grammar", {"kind": "prose", "text": "a"}), "grammar.kind"),
        (with_field("grammar", {"kind": "regex"}), "grammar.text"),
        (with_field("grammar", {"kind": "regex", "text": "a" * 70_000}), "grammar.text"),
        (with_field("return_logprob", 1), "return_logprob"),
        (with_sampling("seed", None), "seed"),
        (with_sampling("seed", 2**64), "seed"),
        (with_sampling("n", 2), "n=2"),
        (with_sampling("max_new_tokens", 0), "max_new_tokens"),
        (with_sampling("max_new_tokens", 511), "max_new_tokens=511: must be at most 510"),
        (with_sampling("min_new_tokens", 10), "min_new_tokens"),
        (with_sampling("stop", "END"), "stop"),
        (with_sampling("stop_token_ids", [320.0]), "stop_token_ids[0]"),
        (with_sampling("allowed_token_ids", [320]), "allowed_token_ids[0]"),
        (with_sampling("allowed_token_ids", []), "allowed_token_ids"),
        (with_sampling("bad_words", ["text"]), "bad_words[0]"),
        (with_sampling("bad_word_ids", [[1], [320]]), "bad_word_ids[1][0]"),
        (with_sampling("bad_word_ids", [[]]), "bad_word_ids[0]: has 0 tokens; must have 1..64"),
        (with_sampling("bad_word_ids", [[1]] * 1025), "bad_word_ids=[[1]"),
        (with_sampling("logit_bias", {"320": 1.0}), "logit_bias"),
        (with_sampling("temperature", -1.0), "temperature"),
        (with_sampling("top_k", 0), "top_k"),
        (with_sampling("top_p", 0.0), "top_p"),
        (with_sampling("no_such", 1), "no_such"),
        (with_sampling("json_schema", "{"), "json_schema"),
    ],
)
def test_what_no_client_may_ask_for_no_server_may(
    change: Callable[[JsonObject], None], problem: str
) -> None:
    body = good()
    parse_resume(body, LIMITS)
    change(body)
    with pytest.raises(RequestError) as caught:
        parse_resume(body, LIMITS)
    assert caught.value.status == 400 and problem in str(caught.value), str(caught.value)


def test_log_probabilities_of_the_prompt_are_told_once() -> None:
    body = good() | {"return_logprob": True, "logprob_start_len": 0}
    with pytest.raises(RequestError, match="logprob_start_len=0: must be -1"):
        parse_resume(body, LIMITS)


def test_two_grammars_are_refused() -> None:
    body = good() | {"grammar": {"kind": "regex", "text": "a+"}}
    with_sampling("regex", "b+")(body)
    with pytest.raises(RequestError, match="at most one"):
        parse_resume(body, LIMITS)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(good())),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=6,
    ),
)
def test_whatever_a_field_holds_it_is_refused_or_fit_for_a_scheduler_and_a_peer(
    field: str, value: JsonValue
) -> None:
    try:
        sample = parse_resume(good() | {field: value}, LIMITS)
    except RequestError as error:
        assert error.status == 400
        return
    check_sampling_params("sampling", sample.sampling)
    encode(
        Submit(
            1, sample.token_ids, sample.sampling, sample.timeout_s, output_ids=[*sample.output_ids]
        )
    )
