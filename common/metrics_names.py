"""Buckets, and which of the scheduler's queues and counters go by which of SGLang's names.

The upper buckets are SGLang's, so that quantiles of both can be compared; the lower ones are added,
because a small model on a fast machine would land in the first bucket altogether.
"""

from __future__ import annotations

_LONG = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
TTFT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, *_LONG)
E2E_BUCKETS = (0.005, 0.01, 0.02, 0.05, *_LONG, 600, 1200, 1800, 2400)
INTER_TOKEN_BUCKETS = (
    *(0.0002, 0.0005, 0.001),
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
STAGE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
TOKEN_COUNT_BUCKETS = tuple(2**power for power in range(21))
TRANSFER_MS_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
TRANSFER_MB_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
TRANSFER_SPEED_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)

# The scheduler's queue -> (metric, help). A role lacks some of the queues; they read 0 then.
QUEUES = {
    "running": ("sglang:num_running_reqs", "Requests that are being computed."),
    "waiting": ("sglang:num_queue_reqs", "Requests that wait to be computed."),
    "retracted": ("sglang:num_retracted_reqs", "Requests that gave their pages back and wait."),
    "bootstrap": (
        "sglang:num_prefill_bootstrap_queue_reqs",
        "Prompts that wait for their decode server.",
    ),
    "inflight": (
        "sglang:num_prefill_inflight_queue_reqs",
        "Prompts whose cache is being sent.",
    ),
    "prealloc": ("sglang:num_decode_prealloc_queue_reqs", "Requests that wait for pages."),
    "transfer": (
        "sglang:num_decode_transfer_queue_reqs",
        "Requests whose cache is being received.",
    ),
}

# The scheduler's counter -> (metric without _total, help).
COUNTERS = {
    "retracted": (
        "sglang:num_retracted_requests",
        "Times that a running request gave its pages back.",
    ),
    "transfer_failed": ("sglang:num_transfer_failed_reqs", "Hand-overs that failed."),
    "bootstrap_failed": (
        "sglang:num_bootstrap_failed_reqs",
        "Requests whose other half never came or was refused.",
    ),
}
