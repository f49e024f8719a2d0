"""Bodies and headers that nobody should send: every answer is one of ours, never a 500.

What the OpenAPI document says of fields is searched by test_openapi.py; here they hold anything,
together and within each other. `BATON_FUZZ_EXAMPLES=20000` in the environment searches for longer.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.frontend.bodies.fields import NESTING_MAX
from common.protocol.frontend import Submit, ToldFrontend
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import run_generate, say_text

EXAMPLE_COUNT = int(os.environ.get("BATON_FUZZ_EXAMPLES", "200"))
FUZZ = settings(
    max_examples=EXAMPLE_COUNT,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TIMEOUT_S = 30.0
# What a server may answer to any body: bad input, too large, not there, no room, or an answer.
ALLOWED = {200, 400, 403, 404, 405, 413, 415, 421, 503}

TEXT = st.text(max_size=12) | st.sampled_from(
    [
        "",
        "hello",
        "\0",
        "\ud800",
        "a" * 5000,
        "<|im_end|>",
        "{{ 7*7 }}",
        "../../etc/passwd",
        "[::1]",
    ]
)
NUMBER = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-300, 1e300, 0.5, 1.5]),
)
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "n",
    "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "logit_bias",
    "frequency_penalty", "sampling_seed", "skip_special_tokens", "regex", "json_schema", "ebnf",
)  # fmt: skip
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid", "stream")
OPENAI = (
    *SAMPLING, *BOOTSTRAP, "model", "max_tokens", "max_completion_tokens", "logprobs", "seed",
    "top_logprobs", "stream_options", "user", "response_format", "echo", "best_of", "suffix",
    "guided_choice", "structured_outputs", "return_token_ids",
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | VALUE,
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": TEXT, "text": TEXT})) | VALUE,
        "tool_calls": VALUE,
        "name": VALUE,
    },
)


def some(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, object]]:
    """A few of the named fields, with anything in them."""
    return st.dictionaries(st.sampled_from(names), VALUE, max_size=3)


def merged(*parts: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    return st.tuples(*parts).map(lambda found: {k: v for part in found for k, v in part.items()})


def one(name: str, value: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional={name: value})


IDS = st.lists(st.integers(0, 300), min_size=1, max_size=4)
GENERATE = merged(
    one("text", TEXT | VALUE),
    one("input_ids", IDS | st.lists(IDS, max_size=3) | VALUE),
    one("sampling_params", some(SAMPLING) | VALUE),
    some((*BOOTSTRAP, "return_logprob", "logprob_start_len", "top_logprobs_num", "input_embeds",
          "token_ids_logprob", "image_data", "lora_path", "session_params")),
)  # fmt: skip
COMPLETION = merged(one("prompt", TEXT | IDS | VALUE), some(OPENAI))
CHAT = merged(
    one("messages", st.lists(MESSAGE, min_size=1, max_size=3) | VALUE),
    some((*OPENAI, "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt",
          "continue_final_message")),
)  # fmt: skip
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "input_text", "thinking", "tool_use", "tool_result"])
        | VALUE,
        **dict.fromkeys(("text", "thinking", "id", "name", "tool_use_id"), TEXT),
        "input": VALUE,
        "content": VALUE,
    },
)
PARTS = st.lists(PART, max_size=3)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])
        | VALUE,
        "role": st.sampled_from(["user", "system", "developer", "assistant"]) | VALUE,
        "status": st.sampled_from(["completed", "incomplete"]) | VALUE,
        **dict.fromkeys(("content", "output", "summary"), TEXT | PARTS | VALUE),
        **dict.fromkeys(("call_id", "name", "arguments"), TEXT | VALUE),
    },
)
RESPONSES = merged(
    one("input", TEXT | st.lists(ITEM, min_size=1, max_size=3) | VALUE),
    some((*OPENAI, "instructions", "tools", "tool_choice", "text", "reasoning", "include",
          "max_output_tokens", "metadata", "previous_response_id", "truncation")),
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | VALUE,
        "content": TEXT | PARTS | VALUE,
    },
)
MESSAGES = merged(
    one("messages", st.lists(TURN, min_size=1, max_size=3) | VALUE),
    one("max_tokens", st.integers(1, 4) | VALUE),
    some((*OPENAI, "system", "tools", "tool_choice", "thinking", "output_config",
          "stop_sequences", "context_management")),
)  # fmt: skip
TOKENS = some(("prompt", "messages", "tokens", "add_special_tokens", "tools"))
ABORT = some(("rid", "abort_all"))
BODIES = st.one_of(
    st.tuples(st.just("/generate"), GENERATE),
    st.tuples(st.just("/v1/completions"), COMPLETION),
    st.tuples(st.just("/v1/chat/completions"), CHAT),
    st.tuples(st.just("/v1/responses"), RESPONSES),
    st.tuples(st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]), MESSAGES),
    st.tuples(st.just("/abort_request"), ABORT),
    st.tuples(st.sampled_from(["/tokenize", "/v1/detokenize"]), TOKENS),
)
PATHS = st.sampled_from(
    ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
     "/v1/messages/count_tokens", "/abort_request", "/flush_cache", "/v1/models/x",
     "/health", "/metrics", "/state", "/", "/nothing"]
)  # fmt: skip
NAMELESS = b'{"text": {"\\ud800": Infinity}}'  # a field whose name no answer can spell
RAW = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"a": ' * 50_000, b"[" * 90_000,
         b'{"text": "\\ud800"}', b'{"text": "\xed\xa0\x80"}', b'{"rid": ' + b"9" * 9000 + b"}",
         b'{"text": NaN}', b'{"input_ids": [1e999]}', b'{"text": "a", "text": "b"}',
         NAMELESS]
    ),
)  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(["x-request-id", "content-type", "accept", "traceparent", "authorization"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    max_size=2,
)


def short_answer(submit: Submit) -> list[ToldFrontend]:
    """Two tokens or fewer, so that a request of any length ends at once."""
    return say_text("ok")(submit)[:2] or say_text("o")(submit)


Ask = Callable[..., httpx.Response]


def search(tmp_path: Path, fuzz: Callable[[Ask], None]) -> None:
    """Run a search on a thread of its own, against one frontend that must outlive it."""

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = short_answer
        loop = asyncio.get_running_loop()

        def ask(method: str, path: str, **what: object) -> httpx.Response:
            asked = rig.http.request(method, path, **what)  # type: ignore[arg-type]
            return asyncio.run_coroutine_threadsafe(asked, loop).result(TIMEOUT_S)

        await asyncio.to_thread(fuzz, ask)
        for path in ("/ping", "/health"):
            assert (await rig.http.get(path)).status_code == 200

    run_generate(tmp_path, story, timeout_s=TIMEOUT_S + EXAMPLE_COUNT)


def check(reply: httpx.Response) -> None:
    assert reply.status_code in ALLOWED, reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


@pytest.mark.slow
def test_no_field_value_breaks_a_route(tmp_path: Path) -> None:
    def fuzz(ask: Ask) -> None:
        @FUZZ
        @given(BODIES)
        def run(call: tuple[str, dict[str, object]]) -> None:
            path, body = call
            content = json.dumps(body).encode("utf-8")
            check(ask("POST", path, content=content))

        run()

    search(tmp_path, fuzz)


# What each reader goes down into: fields that are refused or shown, schemas, tools, templates.
DEEP_BODIES = (
    ("/generate", '{"text": "a", "lora_path": @}'),
    ("/generate", '{"text": "a", "rid": @}'),
    ("/generate", '{"text": "a", "sampling_params": {"json_schema": @}}'),
    ("/v1/completions", '{"prompt": "a", "guided_choice": @}'),
    ("/v1/completions", '{"prompt": "a", "response_format": @}'),
    ("/v1/completions", '{"prompt": "a", "structured_outputs": {"json": @, "regex": null}}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": @}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], '
     '"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": @}}]}'),
    ("/v1/responses", '{"input": "a", "metadata": {"a": @, "b": 1e99, "c": 1' + "0" * 99 + "}}"),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "a": @}]}'),
    ("/v1/responses", '{"input": "a", "text": {"format": {"type": "text", "a": @}}}'),
    ("/v1/responses", '{"input": [{"role": "user", "content": @}]}'),
    ("/v1/messages", '{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], '
     '"tools": [{"name": "f", "input_schema": @}], "tool_choice": {"type": "any"}}'),
    ("/v1/messages/count_tokens", '{"messages": [{"role": "assistant", "content": '
     '[{"type": "tool_use", "id": "a", "name": "f", "input": {"a": @}}]}]}'),
    ("/tokenize", '{"messages": [{"role": "user", "content": "a"}], '
     '"chat_template_kwargs": {"a": @}}'),
    ("/detokenize", '{"tokens": @}'),
)  # fmt: skip
LEVELS = (("[", "]"), ('{"a":', "}"), ('{"type":"object","properties":{"a":', "}}"))


@pytest.mark.parametrize("depth", [NESTING_MAX - 8, 3 * NESTING_MAX])
def test_no_nesting_breaks_a_route(depth: int, tmp_path: Path) -> None:
    """As deep as it is read, and deeper, where the interpreter would still follow."""

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = short_answer
        for path, body in DEEP_BODIES:
            for opening, closing in LEVELS:
                count = depth // opening.count("{") if "{" in opening else depth
                nested = opening * count + "{}" + closing * count
                schema = json.dumps(nested) if "schema" in body else nested
                for content in {body.replace("@", nested), body.replace("@", schema)}:
                    reply = await rig.http.post(path, content=content.encode())
                    check(reply)
                    assert depth < NESTING_MAX or reply.status_code == 400, content

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_name_that_can_not_be_told_breaks_no_route(path: str, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(path, content=NAMELESS)
        assert (reply.status_code, reply.json()["error"]["message"]) == (
            400, "text.?: must be a finite number"
        )  # fmt: skip

    run_generate(tmp_path, story)


@pytest.mark.slow
def test_no_bytes_break_a_route(tmp_path: Path) -> None:
    def fuzz(ask: Ask) -> None:
        @FUZZ
        @given(st.sampled_from(["GET", "POST", "PUT", "DELETE"]), PATHS, RAW, HEADERS, TEXT)
        def run(method: str, path: str, raw: bytes, headers: dict[str, str], query: str) -> None:
            params = {"timeout": query.encode("utf-8", "replace").decode()}
            check(ask(method, path, content=raw, headers=headers, params=params))

        run()

    search(tmp_path, fuzz)
