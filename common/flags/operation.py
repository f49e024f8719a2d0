"""The settings of transfers, time limits, keys, logs, metrics and traces."""

from __future__ import annotations

from common.config import DEFAULT_TRACE_ENDPOINT, MetricsNames, Role, TransferMode, Verify
from common.flags.flag import Flag
from common.flags.values import (
    api_keys,
    choice,
    hosts,
    integer,
    net_devices,
    number,
    origins,
    port_range,
    switch,
    text,
    trace_endpoint,
    ucx_origin,
)
from common.request_bounds import REQUEST_TIMEOUT_S_MAX

TRANSFERS: tuple[Flag, ...] = (
    Flag(
        "transport",
        ("transport",),
        "{auto,shm,stream,ucx-tcp}",
        choice("auto", "shm", "stream", "ucx-tcp"),
        "what carries caches; ucx-tcp trusts all who reach its ports",
    ),
    Flag(
        "transfer_ports",
        ("transfer-ports",),
        "FIRST-LAST",
        port_range,
        "ports that workers may listen on for caches, such as 40000-40031 [any]",
    ),
    Flag(
        "net_devices",
        ("net-devices",),
        "DEVICES",
        net_devices,
        "network devices that UCX may use, comma separated, an RDMA device with its port",
    ),
    Flag(
        "ucx",
        ("ucx",),
        "WHICH",
        ucx_origin,
        "which UCX is loaded: auto, wheel, system or a directory",
    ),
    Flag(
        "transfer_mode",
        ("transfer-mode",),
        "{auto,direct,staged}",
        choice(*TransferMode),
        "how caches travel; direct: never staged; staged: the pool stays private",
    ),
    Flag(
        "staging_buffer_mb",
        ("staging-buffer-mb",),
        "MIB",
        integer(1, 1 << 16),
        "MiB in which staged transfers land, of each rank that receives caches",
    ),
    Flag(
        "layer_group_count",
        ("layer-group-count",),
        "N",
        integer(1, 1024),
        "layer groups of a page that leave one after another",
    ),
    Flag(
        "verify_transfer",
        ("verify-transfer",),
        "{off,sample,full}",
        choice(*Verify),
        "compare caches with what was sent; the stricter side decides",
    ),
)

TIME: tuple[Flag, ...] = (
    Flag(
        "request_timeout_s",
        ("request-timeout",),
        "SECONDS",
        number(0.1, REQUEST_TIMEOUT_S_MAX),
        "seconds that a request may take, and does unless its `timeout` says less",
    ),
    Flag(
        "bootstrap_timeout_s",
        ("bootstrap-timeout",),
        "SECONDS",
        number(0.1, 86400),
        "seconds that either half of a routed request waits for the other one, or a cache that was "
        "computed first",
        role=Role.PREFILL,
    ),
    Flag(
        "drain_timeout_s",
        ("drain-timeout",),
        "SECONDS",
        number(0, 3600),
        "seconds that a stopping server waits for open requests",
    ),
    Flag(
        "relay_timeout_s",
        ("relay-timeout",),
        "SECONDS",
        number(0, REQUEST_TIMEOUT_S_MAX),
        "seconds that a stopping server stays after --drain-timeout for requests that other decode "
        "servers have taken over; 0: none are moved",
        role=Role.DECODE,
    ),
    Flag(
        "heartbeat_interval_s",
        ("heartbeat-interval",),
        "SECONDS",
        number(0.05, 300),
        "seconds between two heartbeats to a peer, at most half of the timeouts",
    ),
    Flag(
        "peer_timeout_s",
        ("peer-timeout",),
        "SECONDS",
        number(0.1, 600),
        "seconds of silence after which a peer is given up",
    ),
    Flag(
        "worker_timeout_s",
        ("worker-timeout",),
        "SECONDS",
        number(0.1, 600),
        "seconds that a worker process may be silent, half of it if the system says it is stopped",
    ),
    Flag(
        "stall_timeout_s",
        ("stall-timeout",),
        "SECONDS",
        number(0.1, 600),
        "seconds that a worker's engine may stand still in a step [2 on a CPU, 10 on a GPU]",
    ),
    Flag(
        "self_test_interval_s",
        ("self-test-interval",),
        "SECONDS",
        number(0, 86400),
        "seconds without a transfer after which one of a token is tried; 0: never",
        role=Role.DECODE,
    ),
)

SECURITY: tuple[Flag, ...] = (
    Flag(
        "api_keys",
        ("api-key",),
        "KEY,...",
        api_keys,
        "keys that HTTP clients must show as `Authorization: Bearer KEY` or `x-api-key: KEY`; seen "
        "by every user of this machine, so better in a file or in BATON_API_KEY [none]",
        is_secret=True,
    ),
    Flag("api_key_file", ("api-key-file",), "FILE", text, "file of such keys, one per line [none]"),
    Flag(
        "admin_api_keys",
        ("admin-api-key",),
        "KEY,...",
        api_keys,
        "keys that administrators' requests ask for [--api-key]; or BATON_ADMIN_API_KEY",
        is_secret=True,
    ),
    Flag(
        "admin_api_key_file",
        ("admin-api-key-file",),
        "FILE",
        text,
        "file of such keys, one per line [none]",
    ),
    Flag(
        "curve_secret_key_file",
        ("curve-secret-key-file",),
        "FILE",
        text,
        "file of this server's key [none]",
    ),
    Flag(
        "curve_peer_keys_file",
        ("curve-peer-keys-file",),
        "FILE",
        text,
        "file of its peers' public keys [none]",
    ),
    Flag(
        "allowed_hosts",
        ("allowed-hosts",),
        "HOST,...",
        hosts,
        "names that the Host header may say, besides localhost and IP addresses, comma separated "
        "[any; on a loopback address none]",
    ),
    Flag(
        "allowed_origins",
        ("allowed-origins", "cors-allowed-origins"),
        "ORIGIN,...",
        origins,
        "origins of web pages that may use this server, comma separated, or * [none]",
    ),
    Flag(
        "max_body_nbytes",
        ("max-body-bytes",),
        "BYTES",
        integer(1024, 1 << 30),
        "largest HTTP request body, in bytes",
    ),
    Flag(
        "strict_fields",
        ("strict-fields",),
        "",
        switch,
        "refuse a body with a field that is unknown, misspelt for example [the answer's `warnings` "
        "header names it]",
    ),
)

LOGS: tuple[Flag, ...] = (
    Flag(
        "log_level",
        ("log-level",),
        "{debug,info,warning,error}",
        choice("debug", "info", "warning", "error", critical="error"),
        "what is logged, from this level on",
    ),
    Flag(
        "log_requests",
        ("log-requests", "enable-log-requests"),
        "",
        switch,
        "log every HTTP request",
    ),
    Flag(
        "metrics_names",
        ("metrics-names",),
        "{sglang,vllm,both}",
        choice(*MetricsNames),
        "whose names /metrics has for what other servers measure too",
    ),
    Flag(
        "request_history",
        ("request-history",),
        "N",
        integer(0, 1 << 16),
        "requests that have ended and are told of in /requests and /trace",
    ),
    Flag(
        "enable_trace",
        ("enable-trace",),
        "",
        switch,
        "send OpenTelemetry spans; needs the extra `trace`",
    ),
    Flag(
        "otlp_traces_endpoint",
        ("otlp-traces-endpoint",),
        "URL",
        trace_endpoint,
        f"send them to this collector, OTLP over HTTP [{DEFAULT_TRACE_ENDPOINT}]",
    ),
)
