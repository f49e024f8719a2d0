"""Every spelling of what an output must be becomes one grammar; a bad one is a 400."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import Role
from common.frontend.bodies.fields import JsonObject
from common.request import Grammar, GrammarKind
from common.request_bounds import GRAMMAR_LENGTH_MAX
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import post, run_generate

SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
}
# The order of properties is the order in which they must come.
TEXT = (
    '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}},"required":["b"]}'
)
IS_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, TEXT)
IS_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
IS_NUMBER = Grammar(GrammarKind.REGEX, "[0-9]+")
IS_COLOUR = Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "red" | "gr\\u00fcn" | "a\\"|b"')
COLOURS = ["red", "grün", 'a"|b']
LARK = 'start: "yes" | "no"'

OPENAI: list[tuple[JsonObject, Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, IS_OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            }
        },
        IS_SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, IS_SCHEMA),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, IS_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, IS_OBJECT),
    ({"structured_outputs": {"regex": "[0-9]+"}}, IS_NUMBER),
    ({"structured_outputs": {"choice": COLOURS}}, IS_COLOUR),
    ({"structured_outputs": {"grammar": LARK}}, Grammar(GrammarKind.LARK, LARK)),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Grammar(
            GrammarKind.JSON_SCHEMA,
            '{"type":"object","x-guidance":{"whitespace_flexible":false}}',
        ),
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        Grammar(
            GrammarKind.JSON_SCHEMA, '{"type":"object","x-guidance":{"whitespace_pattern":" ?"}}'
        ),
    ),
    ({"guided_json": TEXT}, IS_SCHEMA),
    ({"guided_json": {}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
    ({"guided_regex": "[0-9]+"}, IS_NUMBER),
    ({"guided_choice": COLOURS}, IS_COLOUR),
    ({"guided_grammar": LARK}, Grammar(GrammarKind.LARK, LARK)),
    ({"json_schema": TEXT}, IS_SCHEMA),
    ({"regex": "[0-9]+"}, IS_NUMBER),
    ({"ebnf": LARK}, Grammar(GrammarKind.LARK, LARK)),
]
SGLANG: list[tuple[JsonObject, Grammar | None]] = [
    ({"json_schema": TEXT}, IS_SCHEMA),
    ({"json_schema": SCHEMA, "regex": None}, IS_SCHEMA),
    ({"regex": "[0-9]+"}, IS_NUMBER),
    ({"regex": None, "ebnf": ""}, None),
]
ASKS: dict[str, JsonObject] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/generate": {"text": "a"},
}

NESTED = json.dumps({"type": "array", "items": {"$ref": "#/missing"}})
BAD_OPENAI: list[tuple[JsonObject, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nil"}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": None}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"structured_outputs": {"json": NESTED}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "", "json": {}}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"not": {"const": 1}}}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_choice": [5]}, "guided_choice"),
    ({"guided_choice": ["", "", ""]}, "guided_choice"),
    ({"guided_choice": ""}, "guided_choice"),
    ({"guided_regex": False}, "guided_regex"),
    ({"guided_json": []}, "guided_json"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"regex": "a" * (GRAMMAR_LENGTH_MAX + 1)}, "regex"),
]
BAD_SGLANG: list[tuple[JsonObject, str]] = [
    ({"json_schema": "{}x"}, "sampling_params.json_schema"),
    ({"json_schema": {"type": "nil"}}, "sampling_params.json_schema"),
    ({"regex": "(a"}, "sampling_params.regex"),
    ({"ebnf": "root ::= 'a'"}, "sampling_params.ebnf"),
    ({"ebnf": 'root ::= "a"', "regex": "a"}, "sampling_params.ebnf"),
    ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
]


def asked(path: str, constraint: JsonObject) -> JsonObject:
    if path == "/generate":
        return {**ASKS[path], "sampling_params": {**constraint, "max_new_tokens": 1}}
    return {**ASKS[path], **constraint, "max_tokens": 1}


@pytest.mark.parametrize("path", ASKS)
def test_every_spelling_becomes_one_grammar(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        for constraint, grammar in SGLANG if path == "/generate" else OPENAI:
            await post(rig, path, asked(path, constraint))
            assert rig.scheduler.submits[-1].sampling.grammar == grammar, constraint

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", ASKS)
def test_a_bad_one_is_a_400_that_names_its_field(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        for constraint, field in BAD_SGLANG if path == "/generate" else BAD_OPENAI:
            reply = await rig.http.post(path, json=asked(path, constraint))
            assert reply.status_code == 400, (constraint, reply.text)
            assert field in reply.json()["error"]["message"], constraint
            if path != "/generate":
                assert reply.json()["error"]["param"] == field, constraint
        assert rig.scheduler.submits == []

    run_generate(tmp_path, story)


def test_the_first_token_of_a_routed_request_follows_it_too(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {**asked("/generate", {"regex": "[0-9]+"}), "bootstrap_room": 7}
        await post(rig, "/generate", body)
        assert rig.scheduler.submits[-1].sampling.grammar == IS_NUMBER

    run_generate(tmp_path, story, role=Role.PREFILL)


def test_every_sample_of_a_body_gets_its_own(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        sampling: list[JsonObject] = [{"regex": "a"}, {}, {"regex": "b"}]
        await post(rig, "/generate", {"text": ["x", "y", "z"], "sampling_params": [*sampling]})
        assert [submit.sampling.grammar for submit in rig.scheduler.submits] == [
            Grammar(GrammarKind.REGEX, "a"), None, Grammar(GrammarKind.REGEX, "b"),
        ]  # fmt: skip

    run_generate(tmp_path, story)
