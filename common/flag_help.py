"""How `--help` shows the settings: in groups, each with a placeholder for its value.

Knows nothing of what a setting means. A test holds that every flag of either role stands here once.
"""

from __future__ import annotations

# Title -> setting -> placeholder, "" for a switch.
GROUPS: dict[str, dict[str, str]] = {
    "model": {
        "model_path": "DIR",
        "tokenizer_path": "DIR",
        "served_model_name": "NAME",
        "load_format": "FORMAT",
        "dtype": "TYPE",
        "kv_cache_dtype": "TYPE",
        "context_length": "TOKENS",
        "tool_call_parser": "NAME",
        "random_seed": "N",
    },
    "addresses": {
        "host": "HOST",
        "name": "NAME",
        "port": "PORT",
        "bootstrap_port": "PORT",
        "prefill": "HOST:PORT,...",
        "bootstrap_allow": "HOSTS",
    },
    "device and ranks": {
        "device": "DEVICE",
        "attention_backend": "BACKEND",
        "tp_size": "N",
        "pp_size": "N",
        "nnodes": "N",
        "node_rank": "N",
        "dist_init_addr": "HOST:PORT",
        "cpu_thread_count": "N",
        "disable_cuda_graph": "",
        "cuda_graph_max_bs": "N",
    },
    "cache and batches": {
        "page_size": "TOKENS",
        "max_total_tokens": "TOKENS",
        "mem_fraction_static": "SHARE",
        "host_cache_gb": "GIB",
        "disable_radix_cache": "",
        "return_cache": "WHEN",
        "max_checkpoints": "N",
        "chunked_prefill_size": "TOKENS",
        "max_running_requests": "N",
        "max_queued_requests": "N",
        "disable_overlap_schedule": "",
        "schedule_low_priority_values_first": "",
        "local_prefill": "WHEN",
    },
    "transfers": {
        "transport": "TRANSPORT",
        "transfer_ports": "FIRST-LAST",
        "net_devices": "DEVICES",
        "ucx": "WHICH",
        "transfer_mode": "MODE",
        "staging_buffer_mb": "MIB",
        "layer_group_count": "N",
        "verify_transfer": "LEVEL",
    },
    "time": {
        "request_timeout_s": "SECONDS",
        "bootstrap_timeout_s": "SECONDS",
        "drain_timeout_s": "SECONDS",
        "heartbeat_interval_s": "SECONDS",
        "peer_timeout_s": "SECONDS",
        "worker_timeout_s": "SECONDS",
        "stall_timeout_s": "SECONDS",
        "self_test_interval_s": "SECONDS",
    },
    "security": {
        "api_keys": "KEY,...",
        "api_key_file": "FILE",
        "admin_api_keys": "KEY,...",
        "admin_api_key_file": "FILE",
        "curve_secret_key_file": "FILE",
        "curve_peer_keys_file": "FILE",
        "allowed_hosts": "HOST,...",
        "allowed_origins": "ORIGIN,...",
        "max_body_nbytes": "BYTES",
    },
    "logs, metrics and traces": {
        "log_level": "LEVEL",
        "log_requests": "",
        "metrics_names": "WHOSE",
        "request_history": "N",
        "enable_trace": "",
        "otlp_traces_endpoint": "URL",
    },
}
PLACEHOLDERS = {name: shown for group in GROUPS.values() for name, shown in group.items()}
