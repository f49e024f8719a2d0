"""The metrics that are read from a `Snapshot` at a scrape: queues, counters, pages, peers."""

from __future__ import annotations

from common.metrics.definitions import Kind, Metric, Side, View


def _gauge(key: str, text: str, *names: str, side: Side = Side.BOTH) -> Metric:
    return Metric(key, Kind.GAUGE, text, tuple(View(name) for name in names), side=side)


def _labelled(key: str, text: str, name: str, *labels: str, side: Side = Side.BOTH) -> Metric:
    return Metric(key, Kind.GAUGE, text, (View(name, labels),), labels, side=side)


def _counter(key: str, text: str, *names: str, side: Side = Side.BOTH) -> Metric:
    return Metric(key, Kind.COUNTER, text, tuple(View(name) for name in names), side=side)


# Queues and counters of a scheduler, by its own names. A role lacks some of them; they read 0 then.
QUEUES = (
    _gauge(
        "running",
        "Requests that are being computed.",
        "sglang:num_running_reqs",
        "vllm:num_requests_running",
    ),
    _gauge(
        "waiting",
        "Requests that wait to be computed.",
        "sglang:num_queue_reqs",
        "vllm:num_requests_waiting",
    ),
    _gauge(
        "retracted",
        "Requests that gave their pages back and wait.",
        "sglang:num_retracted_reqs",
        side=Side.DECODE,
    ),
    _gauge(
        "bootstrap",
        "Prompts that wait for their decode server.",
        "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_prealloc_queue_reqs",
        side=Side.PREFILL,
    ),
    _gauge(
        "inflight",
        "Prompts whose cache is being sent.",
        "sglang:num_prefill_inflight_queue_reqs",
        side=Side.PREFILL,
    ),
    _gauge(
        "prealloc",
        "Requests that wait for pages, and not for a prefill server.",
        "sglang:num_decode_prealloc_queue_reqs",
        side=Side.DECODE,
    ),
    _gauge(
        "transfer",
        "Requests whose cache is being received.",
        "sglang:num_decode_transfer_queue_reqs",
        side=Side.DECODE,
    ),
)

COUNTERS = (
    _counter(
        "retracted",
        "Times that a running request gave its pages back.",
        "sglang:num_retracted_requests",
        "vllm:num_preemptions",
        side=Side.DECODE,
    ),
    _counter("transfer_failed", "Transfers that failed.", "sglang:num_transfer_failed_reqs"),
    _counter(
        "bootstrap_failed",
        "Requests whose other half never came or was refused.",
        "sglang:num_bootstrap_failed_reqs",
    ),
    _counter(
        "retried",
        "Transfers that were tried again with another prefill server.",
        "baton:transfer_retries",
        side=Side.DECODE,
    ),
    _counter(
        "computed_here",
        "Prompts, or the rest of them, that a decode server with prefill servers computed itself.",
        "baton:prompts_computed_here",
        side=Side.DECODE,
    ),
    _counter(
        "verified",
        "Caches that were compared with what was sent, and are the same.",
        "baton:verified_transfers",
        side=Side.DECODE,
    ),
    _counter(
        "mismatched",
        "Caches that differ from what was sent; they were not used.",
        "baton:mismatched_transfers",
        side=Side.DECODE,
    ),
    _counter(
        "hold_expired",
        "Caches that were computed ahead and that no decode server asked for in time.",
        "baton:holds_expired",
        "vllm:nixl_num_kv_expired_reqs",
        side=Side.PREFILL,
    ),
    _counter(
        "holds_lost",
        "Requests whose cache was computed ahead and had to be computed again.",
        "baton:holds_lost",
        side=Side.DECODE,
    ),
    _counter(
        "waited_for_equal",
        "Prompts that waited while another one computed their beginning.",
        "baton:waited_for_equal_prompts",
    ),
    _counter(
        "local_prefills",
        "Short rests of prompts that the decode server computed, as it had their beginning.",
        "baton:local_prefills",
        side=Side.DECODE,
    ),
    _counter(
        "returns_offered",
        "Caches of ended answers that were offered to the prefill server of their prompt.",
        "baton:returns_offered",
        side=Side.DECODE,
    ),
    _counter(
        "returns_sent",
        "Caches of ended answers that were sent back.",
        "baton:returns_sent",
        side=Side.DECODE,
    ),
    _counter(
        "returns_failed",
        "Caches of ended answers that were asked for and did not arrive.",
        "baton:returns_failed",
        side=Side.DECODE,
    ),
    _counter(
        "returned_tokens",
        "Tokens whose cache was sent back.",
        "baton:returned_tokens",
        side=Side.DECODE,
    ),
    _counter(
        "returns_asked",
        "Caches of ended answers that were asked for.",
        "baton:returns_asked",
        side=Side.PREFILL,
    ),
    _counter(
        "returns_kept",
        "Caches of ended answers that came back.",
        "baton:returns_kept",
        side=Side.PREFILL,
    ),
    _counter(
        "returns_lost",
        "Caches of ended answers that were asked for and did not come, or gave way to a request.",
        "baton:returns_lost",
        side=Side.PREFILL,
    ),
    _counter(
        "transfer_tokens_spared",
        "Prompt tokens that were not sent, as the decode server had their cache.",
        "baton:transfer_tokens_spared",
        side=Side.DECODE,
    ),
    _counter(
        "transfer_nbytes_spared",
        "Cache bytes that were not sent, as the decode server had them.",
        "baton:transfer_bytes_spared",
        side=Side.DECODE,
    ),
    _counter(
        "prefix_evicted_tokens",
        "Tokens that left the prefix cache to make room.",
        "baton:prefix_evicted_tokens",
    ),
    _counter(
        "checkpoints_made",
        "Checkpoints that were kept of prompts and answers.",
        "baton:checkpoints_made",
    ),
    _counter(
        "checkpoints_used", "Prompts that went on from a checkpoint.", "baton:checkpoints_used"
    ),
    _counter(
        "checkpoints_evicted",
        "Checkpoints that were given up to make room.",
        "baton:checkpoints_evicted",
    ),
    _counter(
        "host_saved_tokens",
        "Tokens whose cache was copied to host memory to make room.",
        "baton:host_saved_tokens",
    ),
    _counter(
        "host_loaded_tokens",
        "Tokens whose cache came back from host memory.",
        "baton:host_loaded_tokens",
    ),
    _counter(
        "host_failed_loads",
        "Copies from host memory that failed, so that their tokens were computed again.",
        "baton:host_failed_loads",
    ),
    _counter(
        "spec_steps",
        "Times that proposals for a sequence were verified.",
        "vllm:spec_decode_num_drafts",
        side=Side.DECODE,
    ),
    _counter(
        "spec_proposed_tokens",
        "Tokens that were proposed.",
        "vllm:spec_decode_num_draft_tokens",
        side=Side.DECODE,
    ),
    _counter(
        "spec_accepted_tokens",
        "Proposed tokens that were accepted.",
        "vllm:spec_decode_num_accepted_tokens",
        side=Side.DECODE,
    ),
    _counter("self_tests", "Self-tests that ended.", "baton:self_tests", side=Side.DECODE),
    _counter(
        "self_tests_failed",
        "Self-tests that failed.",
        "baton:self_tests_failed",
        side=Side.DECODE,
    ),
    _counter("peers_lost", "Connections to peers that were lost.", "baton:peers_lost"),
    _counter(
        "starved",
        "Times that pages in quarantine left no room for any request.",
        "baton:starved",
        side=Side.DECODE,
    ),
)

GAUGES = (
    _gauge("up", "Whether the scheduler answers.", "baton:up"),
    _gauge("ready", "Whether requests can be served.", "baton:ready"),
    _gauge("open_requests", "Requests that wait for an answer.", "baton:open_requests"),
    _gauge("throughput", "Output tokens per second, over a second.", "sglang:gen_throughput"),
    _gauge(
        "hit_rate",
        "Share of prompt tokens whose cache was there already, over the latest 128 prompts.",
        "sglang:cache_hit_rate",
    ),
    _gauge(
        "usage",
        "Share of the pool in use, 0 to 1.",
        "sglang:token_usage",
        "vllm:kv_cache_usage_perc",
    ),
    _gauge("used_tokens", "Tokens whose pages are in use.", "sglang:num_used_tokens"),
    _gauge(
        "token_capacity",
        "Tokens that fit at a time; if all layers have a window, those in the windows.",
        "sglang:max_total_num_tokens",
    ),
    _gauge("page_size", "Tokens per page.", "sglang:page_size"),
    _gauge("page_count", "Pages of the pool.", "sglang:num_pages"),
    _labelled(
        "cache_config",
        "1; the labels describe the cache.",
        "sglang:cache_config_info",
        "page_size",
        "num_pages",
    ),
    _labelled(
        "block_config",
        "1; the labels describe the cache in vLLM's words.",
        "vllm:cache_config_info",
        "block_size",
        "num_gpu_blocks",
    ),
    _gauge(
        "prefix_cache_tokens",
        "Tokens in the prefix cache, in use or not; common beginnings count once.",
        "baton:prefix_cache_tokens",
    ),
    _gauge("prefix_cache_nodes", "Nodes of the prefix cache.", "baton:prefix_cache_nodes"),
    _gauge(
        "checkpoints",
        "Checkpoints: states and open pages that a prompt can go on from.",
        "baton:checkpoints",
    ),
    _gauge("checkpoint_max", "Checkpoints that have room.", "baton:checkpoint_max"),
    _gauge(
        "host_cache_tokens",
        "Tokens in the tier in host memory.",
        "baton:host_cache_tokens",
        "sglang:hicache_host_used_tokens",
    ),
    _gauge(
        "host_cache_token_max",
        "Tokens that have room in the tier in host memory.",
        "baton:host_cache_token_max",
        "sglang:hicache_host_total_tokens",
    ),
    _gauge(
        "spec_accept_length",
        "Tokens that came of each verification, since the start.",
        "sglang:spec_accept_length",
        side=Side.DECODE,
    ),
    _gauge(
        "spec_accept_rate",
        "Share of proposed tokens that were accepted, since the start.",
        "sglang:spec_accept_rate",
        side=Side.DECODE,
    ),
    _labelled(
        "pages",
        "Pages by state; the states of a group add up to its pool.",
        "baton:pages",
        "group",
        "state",
    ),
    _labelled("pool_pages", "Pages of a group's pool.", "baton:pool_pages", "group"),
    _labelled(
        "page_bytes",
        "Bytes of one page of a group, on all ranks together.",
        "baton:page_bytes",
        "group",
    ),
    _labelled(
        "token_bytes",
        "Bytes of one token in a group, on all ranks together; 0 if it has one page a request.",
        "baton:token_bytes",
        "group",
    ),
    _labelled("queue_depth", "Requests in each queue, by its name.", "baton:queue_depth", "queue"),
    _labelled("peer_connected", "Whether a peer can be used.", "baton:peer_connected", "peer"),
    _labelled("peer_in_flight", "Transfers under way with a peer.", "baton:peer_in_flight", "peer"),
    _labelled(
        "peer_breaker_open",
        "Whether a peer is left alone after failures.",
        "baton:peer_breaker_open",
        "peer",
        side=Side.DECODE,
    ),
    _labelled(
        "peer_self_test_failing",
        "Whether the last self-test of a peer failed, and no transfer went well since.",
        "baton:peer_self_test_failing",
        "peer",
        side=Side.DECODE,
    ),
)

NAMED_COUNTERS = (
    _counter("late_messages", "Messages for requests already answered.", "baton:late_messages"),
    _counter("engine_steps", "Forward passes.", "baton:engine_steps"),
    Metric(
        "events",
        Kind.COUNTER,
        "Events that the scheduler counts, by name.",
        (View("baton:events", ("event",)),),
        ("event",),
    ),
    Metric(
        "spec_accepted_at",
        Kind.COUNTER,
        "Proposed tokens that were accepted, by their place behind the latest token.",
        (View("vllm:spec_decode_num_accepted_tokens_per_pos", ("position",)),),
        ("position",),
        side=Side.DECODE,
    ),
    Metric(
        "peer_breaker_opened",
        Kind.COUNTER,
        "How often a peer was left alone after failures.",
        (View("baton:peer_breaker_opened", ("peer",)),),
        ("peer",),
        side=Side.DECODE,
    ),
)

SEEN = (*GAUGES, *NAMED_COUNTERS)
