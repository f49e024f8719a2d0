"""Fields that nobody reads: mostly misspelt ones, whose client would wonder at the answer.

A body may also have fields of other servers that change no answer here; those are known.
"""

from __future__ import annotations

import difflib

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject, shown

TOLD_COUNT_MAX = 8  # of one body; a header has a bound

NO_EFFECT = frozenset(
    (
        # OpenAI's: for its records, its bills and its caches.
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "moderation"),
        # vLLM's: of beam search alone, of slow tokenizers alone, of images and of other endpoints;
        # and how many tokens an event of a stream has.
        *("length_penalty", "spaces_between_special_tokens", "media_io_kwargs", "return_mm_kwargs"),
        *("return_token_offsets", "routed_experts_prompt_start", "request_id", "session_id"),
        *("include_reasoning", "stream_interval", "detokenize"),
        # SGLang's and its routers': for logs and metrics, and to choose a rank of several.
        *("log_metrics", "no_logs", "return_text_in_logprobs", "conversation_id", "custom_labels"),
        *("custom_params", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("routing_key", "bootstrap_pair_key", "return_cached_tokens_details"),
        *("separate_reasoning", "stream_reasoning", "routed_experts_start_len", "received_time"),
        *("http_worker_ipc", "require_reasoning", "return_meta_info"),
    )
)
"""Of all bodies, as sent by clients of SGLang, vLLM and OpenAI."""


def known_names(schema: JsonObject) -> frozenset[str]:
    """The fields that a body of this schema may have."""
    described = schema["properties"]
    assert isinstance(described, dict)
    return frozenset(described) | NO_EFFECT


def unknown_names(body: JsonObject, known: frozenset[str], *, is_strict: bool) -> list[str]:
    """A sentence for each field of a body that is unknown, the first TOLD_COUNT_MAX of them; none
    without `known`. Raises: RequestError for the first one if is_strict."""
    if not known or body.keys() <= known:
        return []
    unknown = [name for name in body if name not in known]
    if is_strict:
        raise RequestError(f"{_told(unknown[0], known)} (--strict-fields)", field=unknown[0])
    return [_told(name, known) for name in unknown[:TOLD_COUNT_MAX]]


def _told(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known - NO_EFFECT), n=1, cutoff=0.7)
    hint = f"; did you mean {shown(near[0])}?" if near else ""
    return f"unknown field {shown(name)}{hint}"
