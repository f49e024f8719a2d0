"""What bodies look like, as JSON Schemas.

Routes read bodies themselves, so that they can name what is wrong with one in their API's own
words; this is the same told to machines. Bounds and names come from the readers. What only all of a
body together decides is left to them: of two fields exactly one, or as many rooms as prompts. Knows
nothing of routes.
"""

from __future__ import annotations

from common.frontend.apis import openai_call, openai_chat
from common.frontend.bodies import sampling, validation
from common.frontend.bodies.bootstrap_address import PORT_MAX, ROOM_DIGITS_MAX
from common.frontend.bodies.constraints import CHOICE_COUNT_MAX
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.tools import NAME_PATTERN, TOOL_COUNT_MAX
from common.request_bounds import (
    ASKED_LOGPROB_COUNT_MAX,
    GRAMMAR_LENGTH_MAX,
    INT64_MAX,
    LOGIT_BIAS,
    LOGIT_BIAS_COUNT_MAX,
    RID_LENGTH_MAX,
    ROOM_MAX,
    SAMPLING_NUMBERS,
    SEED_MAX,
    STOP_TOKEN_COUNT_MAX,
    TOP_K_ALL,
    TOP_K_MAX,
    TOP_LOGPROB_COUNT_MAX,
    NumberBounds,
)

# ---- values --------------------------------------------------------------------------------------


def _or_null(kind: str, **bounds: JsonValue) -> JsonObject:
    """null is a field that was not given."""
    return {"type": [kind, "null"], **bounds}


def _integer(low: int, high: int = INT64_MAX) -> JsonObject:
    return _or_null("integer", minimum=low, maximum=high)


def _number_bounds(bounds: NumberBounds) -> JsonObject:
    low = "minimum" if bounds.is_low_allowed else "exclusiveMinimum"
    return {low: bounds.low, "maximum": bounds.high}


def _list(items: JsonObject, **bounds: JsonValue) -> JsonObject:
    return _or_null("array", items=items, **bounds)


def _object(properties: JsonObject, **more: JsonValue) -> JsonObject:
    return _or_null("object", properties=properties, **{"additionalProperties": True, **more})


def _one_or_list(one: JsonObject) -> JsonObject:
    return {"anyOf": [one, {"type": "array", "items": one}]}


def _texts(count_max: int, length_max: int) -> JsonObject:
    text: JsonObject = {"type": "string", "minLength": 1, "maxLength": length_max}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": count_max}, NULL]}


def _refused(names: tuple[str, ...]) -> JsonObject:
    """Fields that this server knows and can't follow."""
    return {name: dict(REFUSED) for name in names}


NULL: JsonObject = {"type": "null"}
BOOLEAN = _or_null("boolean")
TEXT = _or_null("string")
ANY_OBJECT = _or_null("object")
GRAMMAR = _or_null("string", maxLength=GRAMMAR_LENGTH_MAX)
SCHEMA: JsonObject = {
    "type": ["object", "string", "null"],
    "description": "A JSON schema, or its text.",
}
REFUSED: JsonObject = {
    "enum": [None, False, 0, "", [], {}],
    "description": "Not supported: a body that asks for it is answered 400.",
}
TOKEN_ID: JsonObject = {"type": "integer", "minimum": 0, "description": "Below vocab_size."}
TOKEN_IDS: JsonObject = {"type": "array", "items": TOKEN_ID}
PROMPT_TEXT: JsonObject = {"type": "string", "minLength": 1}
PROMPT_IDS: JsonObject = {**TOKEN_IDS, "minItems": 1}

# ---- what bodies share ---------------------------------------------------------------------------

SAMPLING: JsonObject = {
    "n": _integer(1, sampling.N_MAX),
    "top_k": {
        **_integer(TOP_K_ALL, TOP_K_MAX),
        "not": {"const": 0},
        "description": f"{TOP_K_ALL} is all tokens.",
    },
    **{
        name: _or_null("number", **_number_bounds(bounds))
        for name, bounds in SAMPLING_NUMBERS.items()
    },
    "logit_bias": _or_null(
        "object",
        additionalProperties={"type": "number", **_number_bounds(LOGIT_BIAS)},
        propertyNames={"pattern": "^[0-9]{1,19}$"},
        maxProperties=LOGIT_BIAS_COUNT_MAX,
        description="From token ids to what is added to their logits.",
    ),
    "stop": _texts(sampling.STOP_COUNT_MAX, sampling.STOP_LENGTH_MAX),
    "stop_token_ids": _list(TOKEN_ID, maxItems=STOP_TOKEN_COUNT_MAX),
    "ignore_eos": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "no_stop_trim": BOOLEAN,
    **_refused(sampling.UNSUPPORTED_KEYS),
    "json_schema": SCHEMA,
    "regex": GRAMMAR,
    "ebnf": GRAMMAR,
}  # fmt: skip
SEED = _integer(-SEED_MAX - 1, SEED_MAX)
SGLANG_SAMPLING = _object(
    {
        **SAMPLING,
        "max_new_tokens": _integer(0),
        "min_new_tokens": _integer(0),
        "sampling_seed": SEED,
        "seed": SEED,
        "spaces_between_special_tokens": BOOLEAN,
        "stream_interval": _integer(1),
        "custom_params": ANY_OBJECT,
    },
    additionalProperties=False,
)
RID: JsonObject = {"type": "string", "minLength": 1, "maxLength": RID_LENGTH_MAX}
REQUEST: JsonObject = {
    "model": TEXT,
    "rid": {"anyOf": [RID, {"type": "array", "items": RID}, NULL]},
    "stream": BOOLEAN,
    "timeout": _or_null("number", exclusiveMinimum=0, description="Seconds, --request-timeout's."),
    "bootstrap_host": _one_or_list(TEXT),
    "bootstrap_port": _one_or_list(_integer(1, PORT_MAX)),
    "bootstrap_room": _one_or_list(_integer(0, ROOM_MAX)),
    "kv_transfer_params": _object(
        {
            "do_remote_decode": BOOLEAN,
            "do_remote_prefill": BOOLEAN,
            "remote_engine_id": TEXT,
            "remote_request_id": _or_null("string", maxLength=ROOM_DIGITS_MAX),
            "remote_host": TEXT,
            "remote_port": _integer(1, PORT_MAX),
        }
    ),
}
RESPONSE_FORMAT = _object(
    {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": _object({"schema": SCHEMA, "strict": BOOLEAN}),
    },
    required=["type"],
)
CHOICES = _texts(CHOICE_COUNT_MAX, GRAMMAR_LENGTH_MAX)
OPENAI: JsonObject = {
    **_refused(openai_call.UNSUPPORTED_KEYS),
    **SAMPLING,
    **REQUEST,
    "include_stop_str_in_output": BOOLEAN,
    "max_tokens": _integer(0),
    "min_tokens": _integer(0),
    "seed": SEED,
    "guided_json": SCHEMA,
    "guided_regex": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "guided_choice": CHOICES,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": _object(
        {
            "json": SCHEMA,
            "regex": GRAMMAR,
            "grammar": GRAMMAR,
            "choice": CHOICES,
            "json_object": BOOLEAN,
            "disable_any_whitespace": BOOLEAN,
            "whitespace_pattern": TEXT,
            **_refused(("structural_tag",)),
        }
    ),
    "stream_options": _object({"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}),
    "return_token_ids": BOOLEAN,
}
PART: JsonObject = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TOOL_CALLS = _list(
    _object({"function": _object({"arguments": {"type": ["object", "string", "null"]}})})
)
MESSAGE: JsonObject = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}, NULL]},
        "tool_calls": TOOL_CALLS,
    },
    "required": ["role"],
    "description": "Without tool_calls, content must be given.",
}
NAME: JsonObject = {"type": "string", "pattern": f"^({NAME_PATTERN.pattern})$"}
TOOL: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {"name": NAME, "strict": BOOLEAN, "parameters": ANY_OBJECT},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
TOOL_CHOICE: JsonObject = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
# What a template makes a prompt of.
CHAT: JsonObject = {
    "messages": _list(MESSAGE, minItems=1),
    "tools": _list(TOOL, maxItems=TOOL_COUNT_MAX),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": ANY_OBJECT,
    "reasoning_effort": TEXT,
}

# ---- bodies --------------------------------------------------------------------------------------


def _body(properties: JsonObject, *required: str, description: str = "") -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": True,
        "description": description,
    }


GENERATE = _body(
    {
        **_refused(validation.UNSUPPORTED_KEYS),
        **REQUEST,
        "text": {"anyOf": [PROMPT_TEXT, {"type": "array", "items": PROMPT_TEXT}, NULL]},
        "input_ids": {"anyOf": [PROMPT_IDS, {"type": "array", "items": PROMPT_IDS}, NULL]},
        "sampling_params": _one_or_list(SGLANG_SAMPLING),
        "return_logprob": _one_or_list(BOOLEAN),
        "logprob_start_len": _one_or_list(_integer(-1)),
        "top_logprobs_num": _one_or_list(_integer(0, TOP_LOGPROB_COUNT_MAX)),
        "token_ids_logprob": {
            "anyOf": [
                _list(TOKEN_ID, maxItems=ASKED_LOGPROB_COUNT_MAX),
                {"type": "array", "items": _list(TOKEN_ID, maxItems=ASKED_LOGPROB_COUNT_MAX)},
            ]
        },
        "return_text_in_logprobs": BOOLEAN,
    },
    description="One of text and input_ids. A list of them is answered with a list.",
)
COMPLETION = _body(
    {
        **OPENAI,
        "prompt": {
            "anyOf": [
                PROMPT_TEXT,
                {"type": "array", "items": PROMPT_TEXT, "minItems": 1},
                PROMPT_IDS,
                {"type": "array", "items": PROMPT_IDS, "minItems": 1},
            ]
        },
        "echo": BOOLEAN,
        "logprobs": _integer(0, TOP_LOGPROB_COUNT_MAX),
        "best_of": {**_integer(1), "description": "No other number than n."},
        **_refused(("suffix",)),
    },
    "prompt",
)
CHAT_COMPLETION = _body(
    {
        **OPENAI,
        **_refused(openai_chat.UNSUPPORTED_KEYS),
        **CHAT,
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
        "max_completion_tokens": _integer(1),
        "logprobs": BOOLEAN,
        "top_logprobs": _integer(0, openai_chat.CHAT_TOP_LOGPROBS_MAX),
        "modalities": {"enum": [None, [], ["text"]]},
    },
    "messages",
)
TOKENIZE = _body(
    {
        **CHAT,
        "model": TEXT,
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "add_special_tokens": BOOLEAN,
        "return_token_strs": BOOLEAN,
    },
    description="One of prompt and messages.",
)
DETOKENIZE = _body(
    {
        "model": TEXT,
        "tokens": {"anyOf": [TOKEN_IDS, {"type": "array", "items": TOKEN_IDS}]},
        "skip_special_tokens": BOOLEAN,
    },
    "tokens",
)
ABORT = _body(
    {"rid": TEXT, "abort_all": BOOLEAN},
    description="What the rids to abort begin with, or abort_all.",
)
