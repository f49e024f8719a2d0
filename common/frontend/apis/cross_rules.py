"""What fields of one body mean for each other, in words, and in JSON schema where that has any.

For the document at /openapi.json. The readers of bodies hold these rules; a test breaks each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.frontend.bodies.fields import JsonObject


@dataclass(frozen=True, slots=True)
class CrossRules:
    """texts: sentences with the names of fields in backticks. schema: what a schema can say."""

    texts: tuple[str, ...]
    schema: JsonObject = field(default_factory=dict)


def _given(name: str) -> JsonObject:
    """A field that is there, and not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


_ROOMS = (
    "A `bootstrap_host` needs a `bootstrap_room`, and `kv_transfer_params` that ask for a transfer "
    "exclude one.",
    "Lists of `bootstrap_host`, `bootstrap_port` and `bootstrap_room` have one value for each "
    "prompt, or for each sample; rooms of different prompts differ.",
    "`rid` as a list has one name for each prompt, all different.",
)
_OPENAI = (
    "The prompt and `max_tokens` together have at most as many tokens as "
    "`max_request_token_count` of GET /server_info says.",
    "`min_tokens` is at most `max_tokens`.",
    "`prompt_logprobs` is not given where `stream` is true; `stream_options` only where it is.",
    "`logprob_token_ids` needs `logprobs`, and an output.",
    "`truncate_prompt_tokens` is less than `max_request_token_count` of GET /server_info.",
    "At most one of `response_format`, `structured_outputs`, `guided_json`, `guided_regex`, "
    "`guided_grammar`, `guided_choice`, `json_schema`, `regex` and `ebnf` is given.",
    *_ROOMS,
)
_ONE_PROMPT = "Exactly one of `prompt` and `messages` is given."
_TOKENIZE = CrossRules((_ONE_PROMPT,), {"oneOf": [_given("prompt"), _given("messages")]})

CROSS_RULES: dict[str, CrossRules] = {
    "/generate": CrossRules(
        (
            "Exactly one of `text` and `input_ids` is given.",
            "The prompt and `max_new_tokens` together have at most as many tokens as "
            "`max_request_token_count` of GET /server_info says.",
            "`min_new_tokens` is at most `max_new_tokens`.",
            "At most one of `json_schema`, `regex` and `ebnf` is given.",
            "`sampling_params` as a list has one object for each prompt, all with the same `n`.",
            "`logprob_start_len` is at most the number of the prompt's tokens.",
            *_ROOMS,
        ),
        {"oneOf": [_given("text"), _given("input_ids")]},
    ),
    "/v1/completions": CrossRules(
        (
            "`max_tokens` may be 0 with `echo` alone.",
            "`best_of` is `n`, if it is given.",
            *_OPENAI,
        )
    ),
    "/v1/chat/completions": CrossRules(
        (
            "`top_logprobs` needs `logprobs`.",
            "`add_generation_prompt` and `continue_final_message` are not both true.",
            "A `tool_choice` of `required` or of a function needs that in `tools`, whose names "
            "differ.",
            *_OPENAI,
        )
    ),
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/abort_request": CrossRules(
        ("`rid` is given and not empty, or `abort_all` is true.",),
        {
            "anyOf": [
                {"required": ["rid"], "properties": {"rid": {"type": "string", "minLength": 1}}},
                {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
            ]
        },
    ),
    "/resume": CrossRules(
        (
            "`sampling_params` has a `seed`, an `n` of 1, a `max_new_tokens` of at least 1, and no "
            "`stop`, `stop_regex` or `bad_words`.",
            "`output_ids` has fewer tokens than `max_new_tokens`.",
            "`logprob_start_len` is -1 where there are `output_ids`.",
            "At most one of `grammar` and the constraints in `sampling_params` is given.",
        )
    ),
    "/switch_role": CrossRules(
        ("Another `role` than the server's own needs --enable-role-switch.",),
    ),
}
