"""The settings that both roles have, in SGLang's spelling: one table of flag, parser and help.

Knows nothing of roles: a role appends its own flags to `COMMON_FLAGS`. `flag_reading` reads them
from a command line and from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.config import (
    DEFAULT_TRACE_ENDPOINT,
    MetricsNames,
    ReturnCache,
    TransferMode,
    Verify,
)
from common.flag_values import (
    DTYPES,
    OR_DTYPES,
    TOOL_CALL_PARSERS,
    Value,
    address,
    api_keys,
    cache_dtype,
    choice,
    host,
    hosts,
    integer,
    name,
    net_devices,
    number,
    origins,
    page_size,
    port,
    port_range,
    switch,
    text,
    tool_call_parser,
    trace_endpoint,
    ucx_origin,
)
from common.request_bounds import PROPOSAL_COUNT_MAX, REQUEST_TIMEOUT_S_MAX, TOKEN_COUNT_MAX
from common.speculative import DEFAULT_PROPOSAL_MAX, SpeculativeAlgorithm


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. name: as in ServerConfig. parse: text to value, or ValueError("must be ...").

    spellings: without the dashes, the first one is used in messages. A switch takes no value, a
        secret one is never shown.
    """

    name: str
    spellings: tuple[str, ...]
    parse: Callable[[str], Value]
    help: str
    is_switch: bool = False
    is_secret: bool = False


COMMON_FLAGS: tuple[Flag, ...] = (
    Flag("model_path", ("model-path", "model"), text, "directory of the checkpoint"),
    Flag("tokenizer_path", ("tokenizer-path",), text, "directory of the tokenizer [model path]"),
    Flag(
        "served_model_name", ("served-model-name",), text, "what clients call it [directory's name]"
    ),
    Flag("host", ("host",), host, "address to listen on"),
    Flag("name", ("name",), name, "what peers call it in logs, metrics and pages [host:port]"),
    Flag("port", ("port",), port, "HTTP port"),
    Flag("device", ("device",), choice("cpu", "cuda"), "where the model runs: cpu or cuda"),
    Flag("dtype", ("dtype",), choice(*DTYPES), f"of weights: {OR_DTYPES}; auto: the checkpoint's"),
    Flag(
        "kv_cache_dtype",
        ("kv-cache-dtype",),
        cache_dtype,
        "of the cache: as --dtype, or fp8_e4m3 (scale 1.0); auto: the weights'",
    ),
    Flag(
        "attention_backend",
        ("attention-backend",),
        choice("auto", "sdpa", "flashinfer"),
        "auto: flashinfer where it can; sdpa: torch's own; flashinfer: it or no start",
    ),
    Flag("page_size", ("page-size",), page_size, "tokens per page, a power of two in 1..256"),
    Flag(
        "chunked_prefill_size",
        ("chunked-prefill-size",),
        integer(1, 1 << 20),
        "prompt tokens per forward pass, a multiple of the page size",
    ),
    Flag(
        "max_running_requests",
        ("max-running-requests",),
        integer(1, 4096),
        "requests computed together [256, or as many as have room for their state]",
    ),
    Flag(
        "max_checkpoints",
        ("max-checkpoints",),
        integer(0, 1 << 16),
        "ends of prefixes kept to go on from; 0: none [as many as requests, if there is memory]",
    ),
    Flag(
        "max_queued_requests",
        ("max-queued-requests",),
        integer(1, 1 << 16),
        "requests that may wait; more are answered 503",
    ),
    Flag(
        "max_total_tokens",
        ("max-total-tokens",),
        integer(1, 1 << 40),
        "tokens the KV pool holds [from the memory fraction]",
    ),
    Flag(
        "mem_fraction_static",
        ("mem-fraction-static",),
        number(0.01, 0.99),
        "share of free memory for weights and pool",
    ),
    Flag(
        "host_cache_gb",
        ("host-cache-gb",),
        number(0, 1 << 16),
        "GiB of host memory, of all ranks together, for cached prefixes that leave the pool; "
        "0: none",
    ),
    Flag(
        "context_length",
        ("context-length",),
        integer(1, TOKEN_COUNT_MAX),
        "longest request in tokens [the checkpoint's]",
    ),
    Flag(
        "load_format", ("load-format",), choice("auto", "dummy"), "auto or dummy (random weights)"
    ),
    Flag(
        "quantized_weights",
        ("quantized-weights",),
        choice("auto", "narrow", "wide"),
        "which stay as they are stored, in bf16: auto (where that is as fast), "
        "narrow (wherever a kernel multiplies by them) or wide (none)",
    ),
    Flag(
        "log_level",
        ("log-level",),
        choice("debug", "info", "warning", "error"),
        "debug, info, warning or error",
    ),
    Flag(
        "tool_call_parser",
        ("tool-call-parser",),
        tool_call_parser,
        f"how the model writes calls of tools: {', '.join(TOOL_CALL_PARSERS)} [left in the text]",
    ),
    Flag("log_requests", ("log-requests",), switch, "log every HTTP request", is_switch=True),
    Flag(
        "metrics_names",
        ("metrics-names",),
        choice(*MetricsNames),
        "names in /metrics of what other servers measure too: sglang's, vllm's or both",
    ),
    Flag(
        "request_history",
        ("request-history",),
        integer(0, 1 << 16),
        "requests that have ended and are told of in /requests and /trace",
    ),
    Flag(
        "enable_trace",
        ("enable-trace",),
        switch,
        "send OpenTelemetry spans; needs the extra `trace`",
        is_switch=True,
    ),
    Flag(
        "otlp_traces_endpoint",
        ("otlp-traces-endpoint",),
        trace_endpoint,
        f"send them to this collector, OTLP over HTTP [{DEFAULT_TRACE_ENDPOINT}]",
    ),
    Flag("random_seed", ("random-seed",), integer(0, 2**63 - 1), "seed of dummy weights"),
    Flag(
        "tp_size",
        ("tp-size", "tp", "tensor-parallel-size"),
        integer(1, 1024),
        "tensor parallel ranks",
    ),
    Flag(
        "pp_size",
        ("pp-size", "pp", "pipeline-parallel-size"),
        integer(1, 1024),
        "pipeline stages",
    ),
    Flag("nnodes", ("nnodes",), integer(1, 1024), "machines that the ranks are spread over"),
    Flag("node_rank", ("node-rank",), integer(0, 1023), "which of them this is; 0 serves HTTP"),
    Flag(
        "dist_init_addr",
        ("dist-init-addr", "nccl-init-addr"),
        address,
        "host:port of node 0 where the ranks meet; the next port must be free as well",
    ),
    Flag(
        "layer_group_count",
        ("layer-group-count",),
        integer(1, 1024),
        "layer groups of a page that leave one after another",
    ),
    Flag(
        "cpu_thread_count",
        ("cpu-threads",),
        integer(1, 1024),
        "threads of one worker on a CPU [half of the cores, shared by the ranks]",
    ),
    Flag(
        "disable_radix_cache",
        ("disable-radix-cache",),
        switch,
        "do not keep prefixes for later requests",
        is_switch=True,
    ),
    Flag(
        "return_cache",
        ("return-cache",),
        choice(*ReturnCache),
        "whether caches of answers go back to the prefill server of their prompt: auto, if both "
        "servers say so",
    ),
    Flag(
        "disable_cuda_graph",
        ("disable-cuda-graph",),
        switch,
        "on a GPU: do not record decode passes",
        is_switch=True,
    ),
    Flag(
        "cuda_graph_max_bs",
        ("cuda-graph-max-bs",),
        integer(1, 4096),
        "on a GPU: largest batch whose decode passes are recorded; all that may run by default",
    ),
    Flag(
        "disable_overlap_schedule",
        ("disable-overlap-schedule",),
        switch,
        "plan a step only when the last one has returned, as always with --pp-size above 1",
        is_switch=True,
    ),
    Flag(
        "schedule_low_priority_values_first",
        ("schedule-low-priority-values-first",),
        switch,
        "a request's `priority` is more urgent the smaller it is, as with vLLM; else the larger",
        is_switch=True,
    ),
    Flag(
        "speculative_algorithm",
        ("speculative-algorithm",),
        choice(*filter(None, SpeculativeAlgorithm)),
        "verify several tokens in a step, proposed by NGRAM: where the latest ones stood before; "
        "by NEXTN: the checkpoint's layer for that; or by EAGLE3: a head with files of its own. "
        "The last two have a cache, so a pair needs them on both sides [one token in a step]",
    ),
    Flag(
        "speculative_draft_model_path",
        ("speculative-draft-model-path",),
        str,
        "checkpoint directory of an EAGLE3 head",
    ),
    Flag(
        "speculative_num_steps",
        ("speculative-num-steps",),
        integer(1, PROPOSAL_COUNT_MAX),
        f"tokens proposed ahead of a sequence [{DEFAULT_PROPOSAL_MAX}]",
    ),
    Flag(
        "speculative_num_draft_tokens",
        ("speculative-num-draft-tokens",),
        integer(2, PROPOSAL_COUNT_MAX + 1),
        "tokens of a sequence that a step verifies, one more than proposed "
        "[--speculative-num-steps + 1]",
    ),
    Flag(
        "speculative_eagle_topk",
        ("speculative-eagle-topk",),
        integer(1, 1),
        "branches of proposals: one",
    ),
    Flag(
        "transport",
        ("transport",),
        choice("auto", "shm", "stream", "ucx-tcp"),
        "what carries caches: auto, shm, stream, or ucx-tcp, which trusts all who reach its ports",
    ),
    Flag(
        "transfer_ports",
        ("transfer-ports",),
        port_range,
        "ports that workers may listen on for caches, such as 40000-40031 [any]",
    ),
    Flag(
        "transfer_mode",
        ("transfer-mode",),
        choice(*TransferMode),
        "how caches travel: auto, direct (never staged), staged (the pool stays private)",
    ),
    Flag(
        "verify_transfer",
        ("verify-transfer",),
        choice(*Verify),
        "compare caches with what was sent: off, sample or full; the stricter side decides",
    ),
    Flag(
        "staging_buffer_mb",
        ("staging-buffer-mb",),
        integer(1, 1 << 16),
        "MiB in which staged transfers land, of each rank that receives caches",
    ),
    Flag(
        "net_devices",
        ("net-devices",),
        net_devices,
        "network devices that UCX may use, comma separated, an RDMA device with its port",
    ),
    Flag("ucx", ("ucx",), ucx_origin, "which UCX is loaded: auto, wheel, system or a directory"),
    Flag(
        "heartbeat_interval_s",
        ("heartbeat-interval",),
        number(0.05, 300),
        "seconds between two heartbeats to a peer, at most half of the timeouts",
    ),
    Flag(
        "peer_timeout_s",
        ("peer-timeout",),
        number(0.1, 600),
        "seconds of silence after which a peer is given up",
    ),
    Flag(
        "worker_timeout_s",
        ("worker-timeout",),
        number(0.1, 600),
        "seconds that a worker process may be silent, half of it if the system says it is stopped",
    ),
    Flag(
        "stall_timeout_s",
        ("stall-timeout",),
        number(0.1, 600),
        "seconds that a worker's engine may stand still in a step [2 on a CPU, 10 on a GPU]",
    ),
    Flag(
        "request_timeout_s",
        ("request-timeout",),
        number(0.1, REQUEST_TIMEOUT_S_MAX),
        "seconds that a request may take, and does unless its `timeout` says less",
    ),
    Flag(
        "max_body_nbytes",
        ("max-body-bytes",),
        integer(1024, 1 << 30),
        "largest HTTP request body, in bytes",
    ),
    Flag(
        "drain_timeout_s",
        ("drain-timeout",),
        number(0, 3600),
        "seconds that a stopping server waits for open requests",
    ),
    Flag(
        "api_keys",
        ("api-key",),
        api_keys,
        "keys that HTTP clients must show as `Authorization: Bearer KEY`; seen by every user of "
        "this machine, so better in a file or in BATON_API_KEY",
        is_secret=True,
    ),
    Flag("api_key_file", ("api-key-file",), text, "file of such keys, one per line"),
    Flag(
        "admin_api_keys",
        ("admin-api-key",),
        api_keys,
        "keys that administrators' requests ask for [--api-key]; or BATON_ADMIN_API_KEY",
        is_secret=True,
    ),
    Flag(
        "allowed_hosts",
        ("allowed-hosts",),
        hosts,
        "names that the Host header may say, besides localhost and IP addresses, comma separated "
        "[any; on a loopback address none]",
    ),
    Flag(
        "allowed_origins",
        ("allowed-origins", "cors-allowed-origins"),
        origins,
        "origins of web pages that may use this server, comma separated, or * [none]",
    ),
    Flag(
        "enable_role_switch",
        ("enable-role-switch",),
        switch,
        "POST /switch_role makes a prefill server of a decode server and the reverse, with weights "
        "and pool kept; the flags of both roles are taken",
        is_switch=True,
    ),
    Flag(
        "standby",
        ("standby",),
        switch,
        "load weights and wait: POST /switch_role begins to serve",
        is_switch=True,
    ),
    Flag("curve_secret_key_file", ("curve-secret-key-file",), text, "file of this server's key"),
    Flag("curve_peer_keys_file", ("curve-peer-keys-file",), text, "file of its peers' public keys"),
    Flag("admin_api_key_file", ("admin-api-key-file",), text, "file of such keys, one per line"),
)
