"""/openapi.json describes the fields that the readers read, all and no others, and whatever is made
of it, valid or not, is answered in the shape that it tells of, never with a 500."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet
from schemathesis.specs.openapi.checks import negative_data_rejection, response_schema_conformance

from common.frontend.apis import openapi
from common.frontend.apis.info import rid_to_abort
from common.frontend.apis.openai_api import parse_completion
from common.frontend.apis.openai_chat import parse_chat
from common.frontend.apis.token_api import detokenize_body, tokenize_body
from common.frontend.bodies import body_schemas
from common.frontend.bodies.dial_rules import DialRules
from common.frontend.bodies.fields import Fields, JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.sampling import KNOWN_KEYS
from common.frontend.bodies.validation import parse_generate
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import run_generate
from tests.frontend.test_hostile_bodies import ALLOWED, Ask, search
from tests.frontend.tiny_tokenizers import CHATML, write_tokenizer

LIMITS = Limits(
    vocab_size=400,
    request_token_max=4096,
    is_prefill=False,
    model_names=("tiny",),
    dial_rules=DialRules(("any",), ()),
)
# The two below /v1 are read as their namesakes are.
SEARCHED_PATHS = sorted({*openapi.BODIES, "/flush_cache"} - {"/v1/tokenize", "/v1/detokenize"})
HELD: JsonObject = {
    "do_remote_prefill": True,
    "remote_engine_id": "incarnation",
    "remote_request_id": "7",
    "remote_host": "prefill.svc",
    "remote_port": 8998,
}
ROOM: JsonObject = {"bootstrap_room": 7, "bootstrap_host": "prefill.svc", "bootstrap_port": 8998}
SCHEMA: JsonObject = {"type": "object"}
# One body for every way through what both OpenAI APIs read.
OPENAI: list[JsonObject] = [
    {**ROOM, "stream": True, "stream_options": {"include_usage": True}},
    {"kv_transfer_params": HELD},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
]
CHAT: JsonObject = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}],
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        }
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
CHOSEN: JsonObject = {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}


class Watched(dict[str, JsonValue]):
    """An object of a body that notes which of its members are asked for, by their path."""

    def __init__(self, values: JsonObject, seen: set[str], path: str = "") -> None:
        super().__init__({key: watch(value, seen, path + key) for key, value in values.items()})
        self._seen = seen
        self._path = path

    def get(self, key: str, default: JsonValue = None) -> JsonValue:  # type: ignore[override]
        self._seen.add(self._path + key)
        return super().get(key, default)


def watch(value: JsonValue, seen: set[str], path: str) -> JsonValue:
    if isinstance(value, dict):
        return Watched(value, seen, f"{path}.")
    if isinstance(value, list):
        return [watch(item, seen, path) for item in value]
    return value


def names_in(schema: JsonValue, path: str = "") -> set[str]:
    """The paths of all members that a schema describes; items of a list have the list's."""
    if isinstance(schema, list):
        return {name for one in schema for name in names_in(one, path)}
    if not isinstance(schema, dict):
        return set()
    found = names_in(schema.get("anyOf"), path) | names_in(schema.get("items"), path)
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    for key, described in properties.items():
        found |= {path + key} | names_in(described, f"{path}{key}.")
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


Reader = Callable[[JsonObject, Tokenizer], object]


def read_generate(body: JsonObject, tokenizer: Tokenizer) -> object:
    return parse_generate(body, tokenizer, LIMITS, "rid")


def read_completion(body: JsonObject, tokenizer: Tokenizer) -> object:
    return parse_completion(body, tokenizer, LIMITS, "name")


def read_chat(body: JsonObject, tokenizer: Tokenizer) -> object:
    return parse_chat(body, tokenizer, LIMITS, "name", "")


def read_tokenize(body: JsonObject, tokenizer: Tokenizer) -> object:
    return tokenize_body(Fields(body), tokenizer, LIMITS)


def read_detokenize(body: JsonObject, tokenizer: Tokenizer) -> object:
    return detokenize_body(Fields(body), tokenizer, LIMITS)


@pytest.mark.parametrize(
    ("path", "read", "bodies"),
    [
        (
            "/generate",
            read_generate,
            [{"text": "a", **ROOM}, {"input_ids": [1], "kv_transfer_params": HELD}],
        ),
        ("/v1/completions", read_completion, [{"prompt": "a", **more} for more in OPENAI]),
        (
            "/v1/chat/completions",
            read_chat,
            [CHOSEN, *({**CHAT, **more} for more in OPENAI)],
        ),
        ("/tokenize", read_tokenize, [{"prompt": "a"}, CHAT, CHOSEN]),
        ("/detokenize", read_detokenize, [{"tokens": [1]}]),
        ("/abort_request", lambda body, _: rid_to_abort(body), [{"rid": "a"}]),
    ],
)
def test_the_document_has_every_field_that_is_read_and_no_other(
    path: str, read: Reader, bodies: list[JsonObject], tokenizer: Tokenizer
) -> None:
    seen: set[str] = set()
    for body in bodies:
        read(Watched(body, seen), tokenizer)
    described = names_in(openapi.BODIES[path])
    # Members of sampling_params are held below: the readers share more names than it takes.
    assert {name for name in described if not name.startswith("sampling_params.")} == seen


def test_sampling_params_are_those_that_are_known() -> None:
    assert names_in(body_schemas.SGLANG_SAMPLING) == KNOWN_KEYS


def test_the_document_is_served_and_tells_bodies_and_errors(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        document = (await rig.http.get("/openapi.json")).json()
        operations = {
            (path, method): operation
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }
        described = {path for path, method in operations if method == "post"}
        assert described == {*openapi.BODIES, "/flush_cache"}, "a POST that nobody describes"
        for (path, method), operation in operations.items():
            has_body = path in openapi.BODIES and method in openapi.BODY_METHODS
            assert ("requestBody" in operation) == has_body
            assert "default" in operation["responses"]
        ids = [operation["operationId"] for operation in operations.values()]
        assert len(ids) == len(set(ids))
        assert operations["/generate", "put"] == {
            **operations["/generate", "post"], "operationId": "put_generate"
        }  # fmt: skip

    run_generate(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("example_count", [4, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("path", SEARCHED_PATHS)
def test_what_is_made_of_the_document_is_answered_as_it_says(
    path: str, example_count: int, tmp_path: Path
) -> None:
    found = settings(
        max_examples=example_count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a failure is told as it was found: shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )

    def fuzz(ask: Ask) -> None:
        schema = schemathesis.openapi.from_dict(ask("GET", "/openapi.json").json())
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @found
            @given(schema[path]["POST"].as_strategy(generation_mode=mode))
            def run(case: Case) -> None:
                check(case, ask)

            run()

    search(tmp_path, fuzz)


def check(case: Case, ask: Ask) -> None:
    """An answer in the shape of the document; a refusal if the case breaks what that says."""
    content = b""
    if isinstance(case.body, bytes):
        content = case.body
    elif not isinstance(case.body, NotSet):
        content = json.dumps(case.body).encode()
    reply = ask(case.method, case.path, params=case.query, headers=case.headers, content=content)
    assert reply.status_code in ALLOWED, reply.text
    checks = [response_schema_conformance]
    # Beside a prompt, /tokenize reads nothing of what a template is given.
    if case.path != "/tokenize" and reply.status_code != 413:
        checks.append(negative_data_rejection)
    case.validate_response(reply, checks=checks)
