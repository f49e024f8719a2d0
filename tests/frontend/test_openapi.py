"""The fields that /openapi.json describes are read, and whatever is made of it, valid or not, is
answered in the shape that it tells of, never with a 500."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)

from common.errors import RequestError
from common.frontend.apis import openapi
from common.frontend.apis.messages_body import parse_messages
from common.frontend.apis.openai_api import parse_completion
from common.frontend.apis.openai_chat import parse_chat
from common.frontend.apis.responses_body import parse_responses
from common.frontend.bodies.body import Body, fields_of
from common.frontend.bodies.dial_rules import DialRules
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.resume import parse_resume
from common.frontend.bodies.sample import Limits
from common.frontend.bodies.validation import parse_generate
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import run_generate
from tests.frontend.largest import PATHS, RESUME, Server, cases
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
SERVER = Server(vocab_size=LIMITS.vocab_size, prompt_max=64)
# Of these nothing is read but the objects in them, whatever else those hold.
FREE = {"messages.tool_calls", "messages.tool_calls.function.arguments"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


def parse(path: str, body: JsonObject, tokenizer: Tokenizer) -> object:
    match path:
        case "/generate":
            return parse_generate(body, tokenizer, LIMITS, "rid")
        case "/resume":
            return parse_resume(body, LIMITS)
        case "/v1/completions":
            return parse_completion(body, tokenizer, LIMITS, "name")
        case "/v1/responses":
            return parse_responses(body, tokenizer, LIMITS, "name", Parsers())
        case "/v1/messages":
            return parse_messages(body, tokenizer, LIMITS, "name", Parsers())
        case _:
            return parse_chat(body, tokenizer, LIMITS, "name", Parsers())


def with_value(body: JsonValue, field: list[str], value: JsonValue) -> JsonValue:
    """A body with another value in the field, in all items of a list."""
    if not field:
        return value
    if isinstance(body, list):
        return [with_value(item, field, value) for item in body]
    assert isinstance(body, dict)
    return {**body, field[0]: with_value(body.get(field[0]), field[1:], value)}


def names_in(schema: JsonValue) -> set[str]:
    """The names of all members that a schema describes."""
    if isinstance(schema, list):
        return {name for one in schema for name in names_in(one)}
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    return {
        *properties,
        *names_in([*properties.values(), schema.get("anyOf"), schema.get("items")]),
    }


def kinds_of(kind: type[Body]) -> list[type[Body]]:
    return [kind, *(inner for one in kind.__subclasses__() for inner in kinds_of(one))]


def test_every_field_that_is_read_is_described() -> None:
    described = names_in([*openapi.BODIES.values()])
    assert {name for kind in kinds_of(Body) for name in fields_of(kind)} == described


@pytest.mark.parametrize("path", [*PATHS, RESUME])
def test_every_field_that_is_described_is_read_and_checked(path: str, tokenizer: Tokenizer) -> None:
    bodies = {case.field: case.body for case in cases(path, SERVER) if case.field not in FREE}
    for field, body in bodies.items():
        names = field.split(".")
        wrong = with_value(body, names, [{"nothing": 0.5}])
        assert isinstance(wrong, dict)
        with pytest.raises(RequestError, match=names[-1]) as caught:
            parse(path, wrong, tokenizer)
        assert caught.value.status == 400 and caught.value.field is not None
        assert caught.value.field.startswith(names[0])


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
    told = case.operation.definition.raw["responses"]
    assert reply.status_code < 500 or str(reply.status_code) in told, reply.text
    checks = [response_schema_conformance, content_type_conformance]
    if reply.status_code != 413:
        checks.append(negative_data_rejection)
    case.validate_response(reply, checks=checks)
