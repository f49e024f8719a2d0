"""Bodies that hold one field each at its largest value, made from the schemas that are published.

What a schema bounds has its value from there. A field that it leaves unbounded must be in
`_unbounded`, or making its body fails, so that a new field is covered or seen to be missing. Knows
nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.frontend.apis.openapi import BODIES
from common.frontend.bodies.body import REFUSED, TOKEN_ID
from common.frontend.bodies.constraints import CHOICE_COUNT_MAX
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.tools import TOOL_COUNT_MAX
from common.request_bounds import (
    BAD_WORD_COUNT_MAX,
    BAD_WORD_LENGTH_MAX,
    GRAMMAR_LENGTH_MAX,
    NUMBERED_RID_LENGTH_MAX,
    RID_LENGTH_MAX,
    ROOM_MAX,
    STOP_TOKEN_COUNT_MAX,
)
from tests.frontend import largest_typed

PATHS = (
    *("/generate", "/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/messages"),
)
RESUME = "/resume"
FRONTEND_PATHS = (
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    "/v1/messages/count_tokens",
    *("/abort_request", "/drain", "/peers", "/switch_role", "/update_weight_version"),
    *("/pause_generation", "/continue_generation", "/update_weights_from_disk"),
)
"""Bodies of which nothing goes further than the frontend."""
assert {*PATHS, RESUME, *FRONTEND_PATHS} == set(BODIES), "a body that is neither"

OUTPUT_COUNT = 2
WORD_COUNT = BAD_WORD_COUNT_MAX // 2  # each may be two, with and without a space before it
TEXT = "x" * 2048  # in place of one that has no bound
FUNCTION = "f" * 64
OBJECT: JsonObject = {"type": "object"}
SCHEMA: JsonObject = {**OBJECT, "description": "x" * (GRAMMAR_LENGTH_MAX - 100)}
LITERAL = "a" * (GRAMMAR_LENGTH_MAX - 100)
HELD: JsonObject = {
    "do_remote_prefill": True,
    "remote_engine_id": "incarnation",
    "remote_request_id": "7",
}
MESSAGE: JsonObject = {"role": "user", "content": "a"}
TOOL: JsonObject = {"function": {"name": FUNCTION}}
NAMED: JsonObject = {"type": "function", "function": {"name": FUNCTION}}
SOME_TOOLS: JsonObject = {"mode": "auto", "tools": [NAMED]}

BODY: dict[str, JsonObject] = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": OUTPUT_COUNT}},
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": OUTPUT_COUNT, "logprobs": 1},
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": OUTPUT_COUNT, "logprobs": True},
    "/v1/responses": {"input": "a", "max_output_tokens": OUTPUT_COUNT},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": OUTPUT_COUNT},
    RESUME: {
        "rid": "r",
        "token_ids": [5, 6, 7],
        "timeout": 600,
        "sampling_params": {"max_new_tokens": OUTPUT_COUNT, "seed": 1},
    },
}
"""What a body has beside the field."""

MEMBERS: dict[str, JsonObject] = {
    "kv_transfer_params": HELD,
    "response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}},
    "response_format.json_schema": {"schema": OBJECT},
    "messages": MESSAGE,
    "messages.content": {"type": "text", "text": "a"},
    "tools": TOOL,
    "tools.function": {"name": FUNCTION},
    "tool_choice": {**NAMED, "allowed_tools": SOME_TOOLS},
    "tool_choice.allowed_tools": SOME_TOOLS,
    "tool_choice.allowed_tools.tools": NAMED,
    "grammar": {"kind": "regex", "text": "a+"},
}
"""What an object has beside the field, by its own path."""

BESIDE: dict[str, JsonObject] = {
    "bootstrap_host": {"bootstrap_room": 7},
    "bootstrap_port": {"bootstrap_room": 7},
    "stream_options": {"stream": True},
    "top_logprobs_num": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "tool_choice": {"tools": [TOOL]},
    "structured_outputs.disable_any_whitespace": {"structured_outputs": {"json": OBJECT}},
    "structured_outputs.whitespace_pattern": {"structured_outputs": {"json": OBJECT}},
}
"""What a body has beside a field that means nothing alone, by the field or by what holds it."""

LAST: dict[str, JsonObject] = {
    "tool_choice.allowed_tools": {"tool_choice": {"type": "allowed_tools"}},
}
"""As `BESIDE`, in place of what the field's own object has."""

INSTEAD = {"text": "input_ids"}
"""Fields in place of which others are given."""


@dataclass(frozen=True, slots=True)
class Server:
    """What bodies are made for. prompt_max: tokens of a prompt that leave room for OUTPUT_COUNT
    more. token_id_min: of a token that has a text. host, port: where the prefill server listens."""

    vocab_size: int
    prompt_max: int
    token_id_min: int = 5
    host: str = "127.0.0.1"
    port: int = 8998

    def token_ids(self, count: int) -> list[JsonValue]:
        """So many, all different while there are others left."""
        span = self.vocab_size - self.token_id_min
        return [self.vocab_size - 1 - index % span for index in range(count)]


@dataclass(frozen=True, slots=True)
class Case:
    """field: the path of the one that is at its largest; what a list holds has the list's path."""

    path: str
    field: str
    body: JsonObject


Wrap = Callable[[JsonValue], JsonObject]


def cases(path: str, server: Server) -> list[Case]:
    """A case for every field of a path's body, and one for each kind of value that it may have.

    Raises: AssertionError naming a field whose largest value is not known.
    """
    known = _unbounded(server) | (_unbounded_to_resume(server) if path == RESUME else {})
    known |= largest_typed.unbounded(path, "a" * (server.prompt_max // 2), [SCHEMA])
    members = MEMBERS | largest_typed.MEMBERS.get(path, {})
    besides = BESIDE | largest_typed.BESIDE.get(path, {})
    found: list[Case] = []
    for field, schema, wrap in _fields(BODIES[path], members):
        base = {key: value for key, value in BODY[path].items() if key != INSTEAD.get(field)}
        beside, last = _of(field, besides), _of(field, LAST)
        for value in _largest(schema, field, known, server):
            body: JsonValue = base
            for more in (*beside, wrap(value), *last):
                body = _merged(body, more)
            assert isinstance(body, dict)
            found.append(Case(path, field, body))
    return found


def _of(field: str, beside: dict[str, JsonObject]) -> list[JsonObject]:
    return [beside[name] for name in beside if field == name or field.startswith(f"{name}.")]


def _unbounded(server: Server) -> dict[str, list[JsonValue]]:
    """Values of fields that have no bound in the schemas, or where not every value is good."""
    prompt = server.token_ids(server.prompt_max)
    text = "a" * (server.prompt_max // 2)
    schemas: list[JsonValue] = [SCHEMA, json.dumps(SCHEMA)]
    grammars: list[JsonValue] = [f'start: "{LITERAL}"']
    choices: list[JsonValue] = [LITERAL, [str(index) for index in range(CHOICE_COUNT_MAX)]]
    words: list[JsonValue] = [f"{index:04}" for index in range(WORD_COUNT)]
    tools: list[JsonValue] = [{"function": {"name": f"f{i}"}} for i in range(TOOL_COUNT_MAX)]
    return {
        # What this server serves, and where the other one is.
        "model": ["default"],
        "timeout": [600],
        "rid": ["r" * RID_LENGTH_MAX, ["r" * RID_LENGTH_MAX]],
        "bootstrap_host": [server.host, [server.host]],
        "bootstrap_port": [server.port, [server.port]],
        "kv_transfer_params.prompt_token_ids": [prompt],
        "kv_transfer_params.remote_host": [server.host],
        "kv_transfer_params.remote_port": [server.port],
        "kv_transfer_params.remote_engine_id": ["e" * 128],
        "kv_transfer_params.remote_request_id": [str(ROOM_MAX - 1)],
        # What has to fit prompt and pool.
        "text": [text, [text]],
        "prompt": [text, [text], prompt, [prompt]],
        "input_ids": [prompt, [prompt]],
        "logprob_start_len": [3, [3]],
        "max_tokens": [OUTPUT_COUNT],
        "truncate_prompt_tokens": [server.prompt_max],
        "min_tokens": [OUTPUT_COUNT],
        "max_completion_tokens": [OUTPUT_COUNT],
        "sampling_params.max_new_tokens": [OUTPUT_COUNT],
        "sampling_params.min_new_tokens": [OUTPUT_COUNT],
        "best_of": [1],  # as n
        # What has to be tokens of the model.
        "stop_token_ids": [server.token_ids(STOP_TOKEN_COUNT_MAX)],
        "sampling_params.stop_token_ids": [server.token_ids(STOP_TOKEN_COUNT_MAX)],
        "bad_words": [words],
        "sampling_params.bad_words": [words],
        "sampling_params.bad_word_ids": [[server.token_ids(BAD_WORD_LENGTH_MAX)] * WORD_COUNT],
        # Grammars.
        "json_schema": schemas,
        "sampling_params.json_schema": schemas,
        "guided_json": schemas,
        "structured_outputs.json": schemas,
        "response_format.json_schema.schema": schemas,
        "ebnf": grammars,
        "sampling_params.ebnf": grammars,
        "guided_grammar": grammars,
        "structured_outputs.grammar": grammars,
        "guided_choice": choices,
        "structured_outputs.choice": choices,
        "structured_outputs.whitespace_pattern": [r"\x20{0,9}"],
        # What a template makes a prompt of.
        "messages.role": ["user"],
        "messages.content": [text],
        "messages.content.text": [text],
        "messages.tool_calls.function.arguments": [{"x": TEXT}, json.dumps({"x": TEXT})],
        "tools": [tools],
        "tool_choice.allowed_tools.tools": [[NAMED]],
        "tools.function.parameters": [{**OBJECT, "description": TEXT}],
        "chat_template_kwargs": [{"x": TEXT}],
        "reasoning_effort": [TEXT],
        # Taken and not used.
        "sampling_params.custom_params": [{"x": TEXT}],
    }


def _unbounded_to_resume(server: Server) -> dict[str, list[JsonValue]]:
    """Of a request that another server has begun; where clients may have lists, it has none."""
    return {
        "rid": ["r" * NUMBERED_RID_LENGTH_MAX],
        "token_ids": [server.token_ids(server.prompt_max)],
        "output_ids": [server.token_ids(OUTPUT_COUNT - 1)],
        "prefix_seed": ["f" * 32],
        "client": ["f" * 16],
        "grammar": [],
        "logprob_start_len": [3],
    }


def _fields(
    schema: JsonObject,
    members: dict[str, JsonObject],
    path: str = "",
    wrap: Wrap | None = None,
) -> Iterator[tuple[str, JsonObject, Wrap]]:
    """(field, schema, what makes a body of a value) of all fields but those that are refused."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    place = path.rstrip(".")
    for name, described in properties.items():
        assert isinstance(described, dict)
        if described == REFUSED or described == {**REFUSED, "default": None}:
            continue
        beside = {**members.get(place, {}), **members.get(f"{place}/{name}", {})}

        def put(value: JsonValue, name: str = name, beside: JsonObject = beside) -> JsonObject:
            member: JsonObject = {**beside, name: value}
            return member if wrap is None else wrap(member)

        yield f"{path}{name}", described, put
        for inner, is_listed in _objects(described):

            def put_inner(
                value: JsonValue, put: Wrap = put, is_listed: bool = is_listed
            ) -> JsonObject:
                return put([value] if is_listed else value)

            yield from _fields(inner, members, f"{path}{name}.", put_inner)


def _objects(schema: JsonValue) -> list[tuple[JsonObject, bool]]:
    """The objects with named members that a field may hold, by themselves or in a list."""
    assert isinstance(schema, dict)
    if "properties" in schema:
        return [(schema, False)]
    if "items" in schema:
        return [(inner, True) for inner, _ in _objects(schema["items"])]
    kinds = schema.get("anyOf", [])
    assert isinstance(kinds, list)
    found = [one for kind in kinds for one in _objects(kind)]
    return [one for one in found if not one[1]] or found


def _largest(
    schema: JsonValue, field: str, known: dict[str, list[JsonValue]], server: Server
) -> list[JsonValue]:
    """One value for each of the kinds that a schema allows, and the smallest of a number's; none of
    null, and of an object whose members are fields of their own."""
    assert isinstance(schema, dict)
    if field in known:
        return known[field]
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        assert isinstance(schema["enum"], list)
        return [value for value in schema["enum"] if value is not None]
    several = schema.get("anyOf") or [{**schema, "type": kind} for kind in _kinds(schema)]
    assert isinstance(several, list)
    if len(several) > 1:
        return [value for kind in several for value in _largest(kind, field, known, server)]
    match schema:
        case {"type": "null" | ["null"]} | {"properties": {}}:
            return []
        case {"type": "boolean" | ["boolean"]}:
            return [True]
        case {"maximum": largest, "minimum": -1, "description": str() as described} if (
            "for all tokens" in described
        ):
            return [largest]  # of the vocabulary of a test there are more
        case {"maximum": largest, "minimum": smallest}:
            return [largest, smallest]
        case {"maximum": largest}:
            return [largest]
        case {"maxLength": int() as length}:
            return ["a" * length]
        case {"pattern": str()}:
            return [FUNCTION]
        case {"items": items} if items == TOKEN_ID:
            count = schema.get("maxItems")
            assert isinstance(count, int), f"{field}: has no bound"
            return [server.token_ids(count)]
        case {"items": items}:
            one = _largest(items, field, known, server)
            count = schema.get("maxItems", 1)  # a list without a bound has one for each prompt
            assert isinstance(count, int)
            return [_several(value, count) for value in one]
        case {"maxProperties": int() as count, "additionalProperties": inner}:
            return [
                {str(token_id): value for token_id in server.token_ids(count)}
                for value in _largest(inner, field, known, server)
            ]
    raise AssertionError(f"{field}: has no bound in {schema}, and is not in _unbounded")


def _kinds(schema: JsonObject) -> list[JsonValue]:
    kinds = schema["type"]
    return kinds if isinstance(kinds, list) else [kinds]


def _several(value: JsonValue, count: int) -> list[JsonValue]:
    """So many values, no two texts alike."""
    if not isinstance(value, str) or count == 1:
        return [value] * count
    return [value[len(str(index)) :] + str(index) for index in range(count)]


def _merged(value: JsonValue, other: JsonValue) -> JsonValue:
    """Two bodies as one; where both have something, the other's counts."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return other
    both = {key: _merged(value[key], other[key]) for key in value.keys() & other.keys()}
    return {**value, **other, **both}
