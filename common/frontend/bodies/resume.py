"""Bodies of /resume: a request that another server of the fleet has begun, or has taken in.

What one frontend writes, another one reads, with the readers of clients' bodies: no body makes a
scheduler or a peer refuse more than a client's could. Text stays where its client is: there are
tokens, and no stop strings. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from msgspec import Meta, structs

from common.errors import RequestError
from common.frontend.bodies.body import TOKEN_IDS, Body, Json, nested, read, refusal, schema_of
from common.frontend.bodies.constraints import Constraint, only_one
from common.frontend.bodies.fields import JsonObject, JsonValue, check_token_ids
from common.frontend.bodies.prompts import PROMPT_IDS, check_prompt_ids
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.sampling import (
    SGLANG_SAMPLING,
    SamplingChoice,
    fit_to_prompt,
    read_sglang_sampling,
)
from common.frontend.bodies.validation import LogprobFields, with_logprobs
from common.frontend.http.api_keys import CLIENT_DIGITS
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.request import NO_CLAIM, Claim, Grammar, GrammarKind, SamplingParams
from common.request_bounds import (
    GRAMMAR_LENGTH_MAX,
    NUMBERED_RID_LENGTH_MAX,
    PRIORITY_MAX,
    REQUEST_TIMEOUT_S_MAX,
)

# ---- fields --------------------------------------------------------------------------------------

CLIENT = f"^([0-9a-f]{{{CLIENT_DIGITS}}})?$"
SEED = f"^([0-9a-f]{{{2 * DIGEST_NBYTES}}})?$"


class GrammarFields(Body, frozen=True):
    """What the output follows from its first token on."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=GRAMMAR_LENGTH_MAX)]


class ResumeFields(Body, frozen=True, kw_only=True):
    """token_ids: the prompt's. output_ids: of the answer so far. prefix_seed: what the digests of
    the prompt begin with, in hexadecimal digits; "" if nothing of it is to be kept. priority,
    client: as of a `Claim`."""

    rid: Annotated[str, Meta(min_length=1, max_length=NUMBERED_RID_LENGTH_MAX)]
    token_ids: Annotated[
        Json, Meta(description="a list of token ids", extra_json_schema=PROMPT_IDS)
    ]
    output_ids: Annotated[list[Json], Meta(extra_json_schema=TOKEN_IDS)] = []
    timeout: Annotated[float, Meta(gt=0, le=REQUEST_TIMEOUT_S_MAX)]
    sampling_params: Annotated[Json, nested(*SGLANG_SAMPLING)] = None
    grammar: Annotated[Json, nested(GrammarFields)] = None
    prefix_seed: Annotated[
        str, Meta(pattern=SEED, description=f"{2 * DIGEST_NBYTES} hexadecimal digits, or none")
    ] = ""
    priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    client: Annotated[str, Meta(pattern=CLIENT)] = ""


RESUME = schema_of(ResumeFields, LogprobFields)

# ---- writers -------------------------------------------------------------------------------------


def resume_body(
    rid: str,
    token_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingParams,
    left_s: float,
    prefix_digests: bytes,
    claim: Claim = NO_CLAIM,
) -> JsonObject:
    """What `parse_resume` reads. left_s: seconds that the request may still take.
    prefix_digests: of the prompt's beginnings, as the scheduler was told of them."""
    options: JsonObject = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    # A server that does not know a field refuses it.
    if sampling.allowed_token_ids:
        options["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.bad_words:
        options["bad_word_ids"] = [[*word] for word in sampling.bad_words]
    body: JsonObject = {
        "rid": rid,
        "token_ids": list(token_ids),
        "output_ids": list(output_ids),
        "timeout": left_s,
        "sampling_params": options,
        "prefix_seed": prefix_digests[:DIGEST_NBYTES].hex(),
        "priority": claim.priority,
        "client": claim.client,
    }
    if sampling.grammar is not None:
        body["grammar"] = {"kind": str(sampling.grammar.kind), "text": sampling.grammar.text}
    if sampling.return_logprob:
        body |= {
            "return_logprob": True,
            # The prompt's log-probabilities went to the client with the first token.
            "logprob_start_len": -1 if output_ids else sampling.logprob_start_len,
            "top_logprobs_num": sampling.top_logprobs_num,
            "token_ids_logprob": list(sampling.token_ids_logprob),
        }
    return body


# ---- readers -------------------------------------------------------------------------------------


def parse_resume(body: JsonObject, limits: Limits) -> Sample:
    """The one sample that a body asks for. Raises: RequestError."""
    given = read(ResumeFields, body)
    limits = replace(limits, encode=None)
    prompt = check_prompt_ids(given.token_ids, "token_ids", limits)
    output_ids = check_token_ids(given.output_ids, "output_ids", limits.vocab_size)
    choice = _read_choice(given, body, limits)
    choice = with_logprobs(choice, read(LogprobFields, body), prompt, limits)
    sampling = fit_to_prompt(choice, 0, len(prompt.token_ids), limits)
    if len(output_ids) >= sampling.max_new_tokens:
        raise RequestError(
            f"output_ids: {len(output_ids)} tokens; must be fewer than "
            f"sampling_params.max_new_tokens={sampling.max_new_tokens}",
            field="output_ids",
        )
    if output_ids and sampling.logprob_start_len >= 0:
        start = sampling.logprob_start_len
        raise refusal("logprob_start_len", start, "-1, since there are output_ids")
    digests = b""
    if given.prefix_seed and limits.prefix_fingerprint is not None:
        seed = bytes.fromhex(given.prefix_seed)
        digests = extend_digests(seed, prompt.token_ids, lookahead=limits.digest_lookahead)
    return Sample(
        index=0,
        rid=given.rid,
        prompt_text="",
        token_ids=prompt.token_ids,
        sampling=sampling,
        text=choice.text,
        timeout_s=min(given.timeout, limits.request_timeout_s),
        grammar_field="" if choice.constraint is None else choice.constraint.field,
        prefix_digests=digests,
        output_ids=output_ids,
        claim=Claim(given.priority, given.client),
    )


def _read_choice(given: ResumeFields, body: JsonObject, limits: Limits) -> SamplingChoice:
    values: JsonValue = {} if given.sampling_params is None else given.sampling_params
    choice = read_sglang_sampling(values, "sampling_params", limits)
    if choice.n != 1:
        raise refusal("sampling_params.n", choice.n, "1")
    if choice.seed is None:
        raise refusal("sampling_params.seed", None, "given")
    if choice.output.max_new_tokens == 0:
        raise refusal("sampling_params.max_new_tokens", 0, "at least 1")
    if choice.text.stops:
        stops: list[JsonValue] = [*choice.text.stops]
        raise refusal("sampling_params.stop", stops, "absent: text stays where its client is")
    if choice.text.regexes:
        regexes: list[JsonValue] = [*choice.text.regexes]
        raise refusal("sampling_params.stop_regex", regexes, "absent, as stop is")
    found = [] if choice.constraint is None else [choice.constraint]
    if given.grammar is not None:
        asked = read(GrammarFields, given.grammar, "grammar")
        found.append(Constraint("grammar", Grammar(GrammarKind(asked.kind), asked.text)))
    return structs.replace(choice, constraint=only_one(found))
