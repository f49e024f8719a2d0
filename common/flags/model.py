"""The settings of what is computed and where: the checkpoint, the device, the ranks."""

from __future__ import annotations

from common.flags.flag import Flag
from common.flags.values import (
    address,
    cache_dtype,
    choice,
    integer,
    names,
    reasoning_parser,
    switch,
    template_file,
    text,
    tokens,
    tool_call_parser,
    weight_dtype,
    weight_version,
)
from common.output_formats import REASONING_FORMATS, TOOL_FORMATS
from common.request_bounds import TOKEN_COUNT_MAX

ATTENTION_BACKENDS = ("auto", "sdpa", "flashinfer")

MODEL: tuple[Flag, ...] = (
    Flag(
        "model_path", ("model-path", "model"), "DIR", text, "directory of the checkpoint (required)"
    ),
    Flag(
        "tokenizer_path",
        ("tokenizer-path", "tokenizer"),
        "DIR",
        text,
        "directory of the tokenizer [model path]",
    ),
    Flag(
        "served_model_name",
        ("served-model-name",),
        "NAME",
        names,
        "what clients call it; answers say the first one of several [directory's name]",
        takes_several=True,
    ),
    Flag(
        "load_format",
        ("load-format",),
        "{auto,dummy}",
        choice("auto", "dummy", safetensors="auto", hf="auto"),
        "auto: safetensors; dummy: random weights",
    ),
    Flag(
        "weight_version",
        ("weight-version",),
        "NAME",
        weight_version,
        "what the operator calls these weights; servers of a pair must say the same",
    ),
    Flag(
        "quantized_weights",
        ("quantized-weights",),
        "{auto,narrow,wide}",
        choice("auto", "narrow", "wide"),
        "which stay as they are stored: auto (where that is as fast, and experts on CUDA), "
        "narrow (wherever a kernel multiplies by them, and experts) or wide (none)",
    ),
    Flag(
        "dtype",
        ("dtype",),
        "{auto,float32,bfloat16,float16}",
        weight_dtype,
        "of weights; auto: the checkpoint's",
    ),
    Flag(
        "kv_cache_dtype",
        ("kv-cache-dtype",),
        "{auto,float32,bfloat16,float16,fp8_e4m3}",
        cache_dtype,
        "of the cache; auto: the weights'; fp8_e4m3 has the scale 1.0",
    ),
    Flag(
        "context_length",
        ("context-length", "max-model-len"),
        "TOKENS",
        tokens(1, TOKEN_COUNT_MAX),
        "longest request in tokens [the checkpoint's]",
    ),
    Flag(
        "chat_template",
        ("chat-template",),
        "FILE",
        template_file,
        "Jinja template for messages, on both servers alike [the checkpoint's]",
    ),
    Flag(
        "tool_call_parser",
        ("tool-call-parser",),
        "NAME",
        tool_call_parser,
        "how the model writes calls of tools, auto for as its chat template says: "
        f"{', '.join(TOOL_FORMATS)} [left in the text]",
    ),
    Flag(
        "reasoning_parser",
        ("reasoning-parser",),
        "NAME",
        reasoning_parser,
        "how the model writes reasoning, auto for as its chat template says: "
        f"{', '.join(REASONING_FORMATS)} [left in the text]",
    ),
    Flag("random_seed", ("random-seed",), "N", integer(0, 2**63 - 1), "seed of dummy weights"),
)

DEVICE: tuple[Flag, ...] = (
    Flag(
        "device",
        ("device",),
        "{auto,cpu,cuda}",
        choice("auto", "cpu", "cuda"),
        "where the model runs; auto: on GPUs if torch sees any, else on the CPU",
    ),
    Flag(
        "base_gpu_id",
        ("base-gpu-id",),
        "N",
        integer(0, 1023),
        "the GPU of the first rank on this machine; the others take those after it",
    ),
    Flag(
        "attention_backend",
        ("attention-backend",),
        "{auto,sdpa,flashinfer}",
        choice(
            *ATTENTION_BACKENDS, torch_native="sdpa", TORCH_SDPA="sdpa", FLASHINFER="flashinfer"
        ),
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
        "host:port of node 0 where the ranks meet; the next port must be free as well "
        "[needed if there are more]",
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
        ("disable-cuda-graph", "enforce-eager"),
        "",
        switch,
        "on a GPU: do not record decode passes",
    ),
    Flag(
        "cuda_graph_max_bs",
        ("cuda-graph-max-bs", "max-cudagraph-capture-size"),
        "N",
        integer(1, 4096),
        "on a GPU: largest batch whose decode passes are recorded [all requests that may run]",
    ),
)
