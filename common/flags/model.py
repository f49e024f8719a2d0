"""The settings of what is computed and where: the checkpoint, the device, the ranks."""

from __future__ import annotations

from common.flags.flag import Flag
from common.flags.values import (
    DTYPES,
    OR_DTYPES,
    TOOL_CALL_PARSERS,
    address,
    cache_dtype,
    choice,
    integer,
    switch,
    text,
    tool_call_parser,
)
from common.request_bounds import TOKEN_COUNT_MAX

MODEL: tuple[Flag, ...] = (
    Flag("model_path", ("model-path", "model"), "DIR", text, "directory of the checkpoint"),
    Flag(
        "tokenizer_path",
        ("tokenizer-path",),
        "DIR",
        text,
        "directory of the tokenizer [model path]",
    ),
    Flag(
        "served_model_name",
        ("served-model-name",),
        "NAME",
        text,
        "what clients call it [directory's name]",
    ),
    Flag(
        "load_format",
        ("load-format",),
        "FORMAT",
        choice("auto", "dummy"),
        "auto or dummy (random weights)",
    ),
    Flag(
        "quantized_weights",
        ("quantized-weights",),
        "FORM",
        choice("auto", "narrow", "wide"),
        "which stay as they are stored, in bf16: auto (where that is as fast), "
        "narrow (wherever a kernel multiplies by them) or wide (none)",
    ),
    Flag(
        "dtype",
        ("dtype",),
        "TYPE",
        choice(*DTYPES),
        f"of weights: {OR_DTYPES}; auto: the checkpoint's",
    ),
    Flag(
        "kv_cache_dtype",
        ("kv-cache-dtype",),
        "TYPE",
        cache_dtype,
        "of the cache: as --dtype, or fp8_e4m3 (scale 1.0); auto: the weights'",
    ),
    Flag(
        "context_length",
        ("context-length",),
        "TOKENS",
        integer(1, TOKEN_COUNT_MAX),
        "longest request in tokens [the checkpoint's]",
    ),
    Flag(
        "tool_call_parser",
        ("tool-call-parser",),
        "NAME",
        tool_call_parser,
        f"how the model writes calls of tools: {', '.join(TOOL_CALL_PARSERS)} [left in the text]",
    ),
    Flag("random_seed", ("random-seed",), "N", integer(0, 2**63 - 1), "seed of dummy weights"),
)

DEVICE: tuple[Flag, ...] = (
    Flag(
        "device", ("device",), "DEVICE", choice("cpu", "cuda"), "where the model runs: cpu or cuda"
    ),
    Flag(
        "attention_backend",
        ("attention-backend",),
        "BACKEND",
        choice("auto", "sdpa", "flashinfer"),
        "auto: flashinfer where it can; sdpa: torch's own; flashinfer: it or no start",
    ),
    Flag(
        "tp_size",
        ("tp-size", "tp", "tensor-parallel-size"),
        "N",
        integer(1, 1024),
        "tensor parallel ranks",
    ),
    Flag(
        "pp_size",
        ("pp-size", "pp", "pipeline-parallel-size"),
        "N",
        integer(1, 1024),
        "pipeline stages",
    ),
    Flag("nnodes", ("nnodes",), "N", integer(1, 1024), "machines that the ranks are spread over"),
    Flag(
        "node_rank", ("node-rank",), "N", integer(0, 1023), "which of them this is; 0 serves HTTP"
    ),
    Flag(
        "dist_init_addr",
        ("dist-init-addr", "nccl-init-addr"),
        "HOST:PORT",
        address,
        "host:port of node 0 where the ranks meet; the next port must be free as well",
    ),
    Flag(
        "cpu_thread_count",
        ("cpu-threads",),
        "N",
        integer(1, 1024),
        "threads of one worker on a CPU [half of the cores, shared by the ranks]",
    ),
    Flag(
        "disable_cuda_graph",
        ("disable-cuda-graph",),
        "",
        switch,
        "on a GPU: do not record decode passes",
    ),
    Flag(
        "cuda_graph_max_bs",
        ("cuda-graph-max-bs",),
        "N",
        integer(1, 4096),
        "on a GPU: largest batch whose decode passes are recorded; all that may run by default",
    ),
)
