"""The settings of addresses and roles, of the cache, and of the batches computed together."""

from __future__ import annotations

from common.config import LocalPrefill, ReturnCache, Role
from common.flags.addresses import bootstrap_allow, prefill_entries
from common.flags.flag import Flag
from common.flags.values import (
    choice,
    drain_targets,
    host,
    integer,
    name,
    number,
    page_size,
    port,
    switch,
    tokens,
)

ADDRESSES: tuple[Flag, ...] = (
    Flag("host", ("host",), "HOST", host, "address to listen on"),
    Flag(
        "name", ("name",), "NAME", name, "what peers call it in logs, metrics and pages [host:port]"
    ),
    Flag("port", ("port",), "PORT", port, "HTTP port"),
    Flag(
        "bootstrap_port",
        ("bootstrap-port", "disaggregation-bootstrap-port"),
        "PORT",
        port,
        "where decode servers dial",
        role=Role.PREFILL,
    ),
    Flag(
        "prefill",
        ("prefill",),
        "SERVERS",
        prefill_entries,
        "prefill servers' bootstrap ports: host:port, dns:NAME:PORT for all addresses of a name, "
        "file:PATH of a file that is watched, comma separated; or `none` to compute prompts "
        "here (required)",
        role=Role.DECODE,
    ),
    Flag(
        "bootstrap_allow",
        ("bootstrap-allow",),
        "HOSTS",
        bootstrap_allow,
        "hosts, patterns and networks that bootstrap_host may name besides the addresses of "
        "--prefill: any, or none",
        role=Role.DECODE,
    ),
    Flag(
        "drain_to",
        ("drain-to",),
        "URL,...",
        drain_targets,
        "URLs of decode servers that take them over, comma separated, or `auto` for those that its "
        "prefill servers know; an admin key is shown to them [auto]",
        role=Role.DECODE,
    ),
    Flag(
        "serve_plain",
        ("serve-plain",),
        "",
        switch,
        "answer requests without a room as well: a connected decode server generates, and is shown "
        "an admin key",
        role=Role.PREFILL,
    ),
)

ROLES: tuple[Flag, ...] = (
    Flag(
        "enable_role_switch",
        ("enable-role-switch", "enable-pd-role-switch"),
        "",
        switch,
        "POST /switch_role makes a prefill server of a decode server and the reverse, with weights "
        "and pool kept; the flags of both roles are taken",
    ),
    Flag(
        "standby",
        ("standby",),
        "",
        switch,
        "load weights and wait: POST /switch_role begins to serve",
    ),
)

CACHE: tuple[Flag, ...] = (
    Flag(
        "page_size",
        ("page-size", "block-size"),
        "TOKENS",
        page_size,
        "tokens per page, a power of two in 1..256",
    ),
    Flag(
        "max_total_tokens",
        ("max-total-tokens",),
        "TOKENS",
        tokens(1, 1 << 40),
        "tokens the KV pool holds [from the memory fraction]",
    ),
    Flag(
        "mem_fraction_static",
        ("mem-fraction-static", "gpu-memory-utilization"),
        "SHARE",
        number(0.01, 0.99),
        "share of free memory for weights and pool",
    ),
    Flag(
        "host_cache_gb",
        ("host-cache-gb", "kv-offloading-size"),
        "GIB",
        number(0, 1 << 16),
        "GiB of host memory, of all ranks together, for cached prefixes that leave the pool; "
        "0: none",
    ),
    Flag(
        "disable_radix_cache",
        ("disable-radix-cache", "no-enable-prefix-caching"),
        "",
        switch,
        "do not keep prefixes for later requests",
    ),
    Flag(
        "return_cache",
        ("return-cache",),
        "{off,auto}",
        choice(*ReturnCache),
        "whether caches of answers go back to the prefill server of their prompt: auto, if both "
        "servers say so",
    ),
    Flag(
        "max_checkpoints",
        ("max-checkpoints",),
        "N",
        integer(0, 1 << 16),
        "ends of prefixes kept to go on from; 0: none [as many as requests, if there is memory]",
    ),
    Flag(
        "chunked_prefill_size",
        ("chunked-prefill-size", "max-num-batched-tokens"),
        "TOKENS",
        tokens(1, 1 << 20),
        "prompt tokens per forward pass, a multiple of the page size",
    ),
    Flag(
        "max_running_requests",
        ("max-running-requests", "max-num-seqs"),
        "N",
        integer(1, 4096),
        "requests computed together [256, or as many as have room for their state]",
    ),
    Flag(
        "max_queued_requests",
        ("max-queued-requests",),
        "N",
        integer(1, 1 << 16),
        "requests that may wait; more are answered 503",
    ),
    Flag(
        "disable_overlap_schedule",
        ("disable-overlap-schedule", "no-async-scheduling"),
        "",
        switch,
        "plan a step only when the last one has returned, as always with --pp-size above 1",
    ),
    Flag(
        "schedule_low_priority_values_first",
        ("schedule-low-priority-values-first",),
        "",
        switch,
        "a request's `priority` is more urgent the smaller it is, as with vLLM; else the larger",
    ),
    Flag(
        "local_prefill",
        ("local-prefill",),
        "{off,auto,fallback}",
        choice(*LocalPrefill),
        "what is computed here: off, nothing; auto, short rests of cached prompts where that is "
        "quicker; fallback, whole prompts too if no prefill server can be found",
        role=Role.DECODE,
    ),
)
