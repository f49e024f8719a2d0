"""The metrics that are counted when something happens: latencies, requests, transfers."""

from __future__ import annotations

from common.failures import FailureKind
from common.metrics import buckets
from common.metrics.definitions import Kind, Metric, Side, View

_STREAMING = ("is_streaming",)
_FLAGS = (("true",), ("false",))
DEVICE = "device"  # the only tier that there is, in SGLang's words
CACHED_ON = ("prefill", "decode", "both")
FINISH_REASONS = ("stop", "length", "abort", "error")

LATENCIES = (
    Metric(
        "ttft",
        Kind.HISTOGRAM,
        "From a request's arrival to its first token.",
        (
            View("sglang:time_to_first_token_seconds", _STREAMING),
            View("vllm:time_to_first_token_seconds"),
        ),
        _STREAMING,
        buckets.TTFT,
        Side.DECODE,
    ),
    Metric(
        "inter_token",
        Kind.HISTOGRAM,
        "Between two output tokens of a request; tokens that came together share their time.",
        (
            View("sglang:inter_token_latency_seconds"),
            View("vllm:inter_token_latency_seconds"),
            View("vllm:time_per_output_token_seconds"),
        ),
        buckets=buckets.INTER_TOKEN,
        side=Side.DECODE,
    ),
    Metric(
        "per_output_token",
        Kind.HISTOGRAM,
        "Mean time per output token after a request's first.",
        (
            View("sglang:request_time_per_output_token_seconds", _STREAMING),
            View("vllm:request_time_per_output_token_seconds"),
        ),
        _STREAMING,
        buckets.INTER_TOKEN,
        Side.DECODE,
    ),
    Metric(
        "e2e",
        Kind.HISTOGRAM,
        "From a request's arrival to its last token.",
        (
            View("sglang:e2e_request_latency_seconds", _STREAMING),
            View("vllm:e2e_request_latency_seconds"),
        ),
        _STREAMING,
        buckets.E2E,
        Side.DECODE,
    ),
    Metric(
        "queue_time",
        Kind.HISTOGRAM,
        "Time in which a request waited for pages or for its turn to be computed.",
        (View("sglang:queue_time_seconds"), View("vllm:request_queue_time_seconds")),
        buckets=buckets.TTFT,
    ),
    Metric(
        "inference_time",
        Kind.HISTOGRAM,
        "From the end of its wait to a request's last token.",
        (View("vllm:request_inference_time_seconds"),),
        buckets=buckets.E2E,
        side=Side.DECODE,
    ),
    Metric(
        "per_stage",
        Kind.HISTOGRAM,
        "Time in a stage, as SGLang divides them: prefill_bootstrap, prefill_forward and "
        "prefill_transfer_kv_cache, or decode_bootstrap and decode_transferred.",
        (View("sglang:per_stage_req_latency_seconds", ("stage",)),),
        ("stage",),
        buckets.STAGE,
    ),
    Metric(
        "prompt_length",
        Kind.HISTOGRAM,
        "Prompt tokens of a request.",
        (View("sglang:prompt_tokens_histogram"), View("vllm:request_prompt_tokens")),
        buckets=buckets.TOKEN_COUNT,
    ),
    Metric(
        "output_length",
        Kind.HISTOGRAM,
        "Output tokens of a request.",
        (
            View("sglang:generation_tokens_histogram"),
            View("vllm:request_generation_tokens"),
            View("vllm:request_max_num_generation_tokens"),
        ),
        buckets=buckets.TOKEN_COUNT,
    ),
)

REQUESTS = (
    Metric(
        "requests",
        Kind.COUNTER,
        "Requests that have ended.",
        (
            View("sglang:num_requests", _STREAMING),
            View("sglang:num_aborted_requests", only=("finished_reason", "abort")),
            View("vllm:request_success", ("finished_reason",)),
        ),
        ("is_streaming", "finished_reason"),
        starts_at=tuple((flag, reason) for (flag,) in _FLAGS for reason in FINISH_REASONS),
    ),
    Metric(
        "failed",
        Kind.COUNTER,
        "Requests that ended in an error, by its kind.",
        (View("baton:failed_requests", ("kind",)),),
        ("kind",),
        starts_at=tuple((str(kind),) for kind in FailureKind if kind is not FailureKind.ABORTED),
    ),
    Metric(
        "prompt_tokens",
        Kind.COUNTER,
        "Prompt tokens of ended requests.",
        (
            View("sglang:prompt_tokens", _STREAMING),
            View("vllm:prompt_tokens"),
            View("vllm:prefix_cache_queries"),
        ),
        _STREAMING,
        starts_at=_FLAGS,
    ),
    Metric(
        "output_tokens",
        Kind.COUNTER,
        "Output tokens, counted as they come.",
        (View("sglang:generation_tokens", _STREAMING), View("vllm:generation_tokens")),
        _STREAMING,
        starts_at=_FLAGS,
    ),
    Metric(
        "cached_tokens",
        Kind.COUNTER,
        "Prompt tokens whose cache was there already, on one server alone or on both.",
        (
            View("sglang:cached_tokens", ("cache_source",)),
            View("vllm:prefix_cache_hits"),
            View("baton:cached_tokens", ("server",)),
        ),
        ("cache_source", "server"),
        starts_at=tuple((DEVICE, server) for server in CACHED_ON),
    ),
)

TRANSFERS = (
    Metric(
        "stage",
        Kind.HISTOGRAM,
        "Parts of a request's time, one after another: reserve, queue, prefill, transfer and "
        "first_token add up to the time to first token, decode is the rest.",
        (
            View("baton:transfer_stage_seconds", ("stage", "peer")),
            View("vllm:request_prefill_time_seconds", only=("stage", "prefill")),
            View("vllm:request_decode_time_seconds", only=("stage", "decode")),
        ),
        ("stage", "peer"),
        buckets.STAGE,
        Side.DECODE,
    ),
    Metric(
        "wire_ms",
        Kind.HISTOGRAM,
        "Time in which bytes of a transfer were on the wire, in ms.",
        (View("sglang:kv_transfer_latency_ms"),),
        buckets=buckets.TRANSFER_MS,
        side=Side.PREFILL,
    ),
    Metric(
        "size_mb",
        Kind.HISTOGRAM,
        "Size of a transfer in 10^6 bytes.",
        (View("sglang:kv_transfer_total_mb"),),
        buckets=buckets.TRANSFER_MB,
        side=Side.PREFILL,
    ),
    Metric(
        "speed_gb_s",
        Kind.HISTOGRAM,
        "Bytes of a transfer over its time on the wire, in 10^9 per second.",
        (
            View("sglang:kv_transfer_speed_gb_s"),
            View("baton:peer_transfer_speed_gb_s", ("peer",)),
        ),
        ("peer",),
        buckets.TRANSFER_SPEED,
        Side.PREFILL,
    ),
    Metric(
        "bootstrap_ms",
        Kind.HISTOGRAM,
        "From a prompt's arrival until its decode server's reservation was there, in ms.",
        (View("sglang:kv_transfer_bootstrap_ms"),),
        buckets=buckets.TRANSFER_MS,
        side=Side.PREFILL,
    ),
    Metric(
        "alloc_ms",
        Kind.HISTOGRAM,
        "From a request's arrival until its pages were reserved, in ms.",
        (View("sglang:kv_transfer_alloc_ms"),),
        buckets=buckets.TRANSFER_MS,
        side=Side.DECODE,
    ),
    Metric(
        "transfer_bytes",
        Kind.COUNTER,
        "Cache bytes sent (prefill) or received (decode).",
        (
            View("baton:transfer_bytes"),
            View("baton:peer_transfer_bytes", ("peer",)),
        ),
        ("peer",),
    ),
    Metric(
        "exposed_bytes",
        Kind.COUNTER,
        "Cache bytes that were still to move when the last layer was computed.",
        (View("baton:transfer_exposed_bytes"),),
    ),
    Metric(
        "transfer_runs",
        Kind.COUNTER,
        "Contiguous runs that cache bytes went in.",
        (View("baton:transfer_runs"),),
    ),
)

RECORDED = (*LATENCIES, *REQUESTS, *TRANSFERS)
