"""SGLang's and vLLM's flags that are no settings here: what is taken although it changes nothing,
and what to write instead of the rest.

Their flags that mean what a setting of ours means are spellings of that. Knows nothing of reading.
Source: the server arguments that SGLang 0.5 and vLLM 0.2x to 0.3x document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from common.config import Role

ANY, OFF = ".*", "false|False|0|none|None"
# Of vLLM's connectors, those that keep caches somewhere instead of sending them to a server.
OTHER_CONNECTORS = "Multi|Offloading|LMCache|Storage|Example"


class Takes(StrEnum):
    """What follows a flag on a command line."""

    NOTHING = ""
    VALUE = "VALUE"
    VALUES = "VALUE ..."


@dataclass(frozen=True, slots=True)
class ForeignFlags:
    """Flags of other servers with one answer.

    answer: why nothing changes, or what to write instead.
    switches, valued, listed: the names without the dashes, by what follows them.
    harmless: a regular expression of the values that change nothing; a switch that is given has the
        value "true". All other values are refused with the answer.
    role: the server that answers so; None: both.
    """

    answer: str
    switches: str = ""
    valued: str = ""
    listed: str = ""
    harmless: str = ANY
    role: Role | None = None

    @property
    def names(self) -> dict[str, Takes]:
        return {
            name: takes
            for names, takes in (
                (self.switches, Takes.NOTHING),
                (self.valued, Takes.VALUE),
                (self.listed, Takes.VALUES),
            )
            for name in names.split()
        }

    def is_harmless(self, value: str) -> bool:
        return re.fullmatch(self.harmless, value, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One of them."""

    takes: Takes
    row: ForeignFlags


ROLES = (
    ForeignFlags(
        "this is the prefill server, `python -m decode_server` is the decode server",
        valued="disaggregation-mode",
        harmless="prefill",
        role=Role.PREFILL,
    ),
    ForeignFlags(
        "this is the decode server, `python -m prefill_server` is the prefill server",
        valued="disaggregation-mode",
        harmless="decode|null",
        role=Role.DECODE,
    ),
    ForeignFlags(
        "this is the prefill server, where vLLM's kv_consumer is `python -m decode_server`, which "
        "finds this one by --prefill; caches are kept in host memory by --host-cache-gb",
        valued="kv-transfer-config",
        harmless=f"(?!.*(kv_consumer|{OTHER_CONNECTORS})).*",
        role=Role.PREFILL,
    ),
    ForeignFlags(
        "this is the decode server, which finds vLLM's kv_producer, `python -m prefill_server`, by "
        "--prefill; caches are kept in host memory by --host-cache-gb",
        valued="kv-transfer-config",
        harmless=f"(?!.*(kv_producer|{OTHER_CONNECTORS})).*",
        role=Role.DECODE,
    ),
)

HARMLESS = (
    ForeignFlags(
        "a request's `seed` is its own, and --random-seed is that of dummy weights",
        valued="seed",
    ),
    ForeignFlags(
        "no code of a checkpoint is ever run",
        switches="trust-remote-code",
    ),
    ForeignFlags(
        "UCX or streams carry caches, --transport says which",
        valued="disaggregation-transfer-backend",
    ),
    ForeignFlags(
        "UCX finds the RDMA devices, --net-devices NAME:PORT chooses among them",
        valued="disaggregation-ib-device mooncake-ib-device",
    ),
    ForeignFlags(
        "the two servers tell each other their layouts, and what a transfer needs is reserved",
        valued="disaggregation-prefill-pp disaggregation-decode-tp disaggregation-decode-dp "
        "disaggregation-decode-polling-interval disaggregation-decode-extra-slots "
        "disaggregation-decode-allocation-policy disaggregation-decode-retraction-backup "
        "num-reserved-decode-tokens optimistic-prefill-attempts",
    ),
    ForeignFlags(
        "prefixes are kept, unless --disable-radix-cache is given",
        switches="disaggregation-decode-enable-radix-cache enable-prefix-caching",
        valued="radix-eviction-policy prefix-caching-hash-algo",
    ),
    ForeignFlags(
        "/metrics and /get_load are always there, with all of their figures",
        switches="enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics "
        "collect-tokens-histogram disable-log-stats enable-server-load-tracking",
        valued="show-hidden-metrics-for-version load-watch-interval collect-detailed-traces",
        listed="bucket-time-to-first-token bucket-inter-token-latency "
        "bucket-e2e-request-latency prompt-tokens-buckets generation-tokens-buckets",
    ),
    ForeignFlags(
        "--log-level and --log-requests say what is logged",
        switches="disable-log-requests no-enable-log-requests disable-uvicorn-access-log "
        "enable-request-time-stats-logging show-time-cost log-error-stack use-tqdm-on-load "
        "no-use-tqdm-on-load",
        valued="log-level-http uvicorn-log-level log-requests-level log-requests-format "
        "max-log-len decode-log-interval crash-dump-folder disable-access-log-for-endpoints",
        listed="log-requests-target uvicorn-access-log-exclude-prefixes",
    ),
    ForeignFlags(
        "answers always say how many tokens of a prompt were cached",
        switches="enable-cache-report enable-prompt-tokens-details",
    ),
    ForeignFlags(
        "calls of tools are read as soon as --tool-call-parser says how they are written",
        switches="enable-auto-tool-choice",
    ),
    ForeignFlags(
        "a first pass is always run before a server is ready",
        switches="skip-server-warmup",
    ),
    ForeignFlags(
        "the checkpoint is a local directory",
        valued="download-dir safetensors-load-strategy weight-loader-prefetch-num-threads",
        switches="weight-loader-disable-mmap weight-loader-prefetch-checkpoints",
    ),
    ForeignFlags(
        "kernels are chosen at start, by what is right and fast on the device",
        switches="enable-torch-compile enable-flashinfer-allreduce-fusion "
        "disable-custom-all-reduce enable-nccl-nvls enable-symm-mem enable-torch-symm-mem "
        "enable-mscclpp enable-p2p-check disable-flashinfer-autotune "
        "flashinfer-mla-disable-ragged disable-shared-experts-fusion "
        "disable-chunked-prefix-cache enable-fused-qk-norm-rope disable-cuda-graph-padding "
        "disable-piecewise-cuda-graph enable-profile-cuda-graph enable-cudagraph-gc "
        "triton-attention-reduce-in-fp32 disable-outlines-disk-cache",
        valued="prefill-attention-backend decode-attention-backend mm-attention-backend "
        "dsa-prefill-backend dsa-decode-backend nsa-prefill-backend nsa-decode-backend "
        "sampling-backend grammar-backend structured-outputs-config guided-decoding-backend "
        "fp8-gemm-backend fp4-gemm-backend moe-runner-backend torch-compile-max-bs "
        "triton-attention-num-kv-splits compilation-config optimization-level "
        "max-seq-len-to-capture",
        listed="cuda-graph-bs cudagraph-capture-sizes piecewise-cuda-graph-tokens",
    ),
    ForeignFlags(
        "the tensor parallel ranks share the experts",
        switches="enable-expert-parallel enable-eplb enable-ep-moe enable-deepep-moe",
        valued="ep-size expert-parallel-size ep moe-a2a-backend all2all-backend deepep-mode "
        "deepep-config eplb-algorithm eplb-config ep-num-redundant-experts ep-dispatch-algorithm "
        "init-expert-location moe-dense-tp-size",
    ),
    ForeignFlags(
        "batches are planned without it",
        switches="enable-mixed-chunk enable-dynamic-chunking enable-chunked-prefill "
        "no-enable-chunked-prefill enable-two-batch-overlap enable-single-batch-overlap "
        "async-scheduling enable-priority-scheduling disable-hybrid-swa-memory "
        "disable-hybrid-kv-cache-manager no-disable-hybrid-kv-cache-manager "
        "enable-tokenizer-batch-encode disable-tokenizer-batch-decode "
        "enable-dynamic-batch-tokenizer enable-prefill-delayer sleep-on-idle",
        valued="schedule-policy schedule-conservativeness max-prefill-tokens prefill-max-requests "
        "num-continuous-decode-steps num-scheduler-steps stream-interval scheduler-recv-interval "
        "pp-max-micro-batch-size pp-async-batch-depth swa-full-tokens-ratio swap-space "
        "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold "
        "max-mamba-cache-size mamba-full-memory-ratio mamba-scheduler-strategy "
        "mamba-track-interval load-balance-method",
    ),
    ForeignFlags(
        "the supervisor starts one process for each rank and watches it: --worker-timeout and "
        "--stall-timeout say for how long",
        switches="headless",
        valued="distributed-executor-backend nccl-port dist-timeout watchdog-timeout "
        "soft-watchdog-timeout tokenizer-worker-num api-server-count",
        listed="numa-node",
    ),
    ForeignFlags(
        "requests have texts only",
        switches="language-model-only disable-fast-image-processor keep-mm-feature-on-device",
        valued="limit-mm-per-prompt limit-mm-data-per-request mm-processor-cache-gb "
        "mm-processor-kwargs allowed-local-media-path",
    ),
    ForeignFlags(
        "/openapi.json has the bounds of requests",
        valued="max-logprobs",
    ),
    ForeignFlags(
        "--allowed-origins alone says which pages may ask",
        switches="allow-credentials",
        valued="allowed-methods allowed-headers",
    ),
)

REFUSED = (
    ForeignFlags(
        "there are no data parallel ranks: leave it out, or start as many servers and name each in "
        "--prefill or at a router",
        valued="dp-size data-parallel-size dp data-parallel-size-local",
        switches="enable-dp-attention enable-dp-lm-head",
        harmless=f"1|{OFF}",
    ),
    ForeignFlags(
        "only heads and layers are shared among ranks: leave it out, or raise --tp-size or "
        "--pp-size",
        valued="attn-cp-size attention-context-parallel-size dcp-size moe-dp-size "
        "moe-data-parallel-size decode-context-parallel-size prefill-context-parallel-size",
        harmless="1",
    ),
    ForeignFlags(
        "ranks take GPUs that follow each other: write CUDA_VISIBLE_DEVICES=... before the command",
        valued="gpu-id-step",
        harmless="1",
    ),
    ForeignFlags(
        "write --dist-init-addr HOST:PORT instead",
        valued="master-addr master-port data-parallel-address data-parallel-rpc-port",
        harmless=OFF,
    ),
    ForeignFlags(
        "write --host-cache-gb GIB, of all ranks together, instead",
        switches="enable-hierarchical-cache enable-lmcache "
        "disaggregation-decode-enable-offload-kvcache",
        valued="hicache-size hicache-ratio",
        harmless=OFF,
    ),
    ForeignFlags(
        "cached prefixes are kept in memory only, by --host-cache-gb: leave it out",
        valued="hicache-storage-backend hicache-write-policy hicache-io-backend hicache-mem-layout "
        "hicache-storage-prefetch-policy hicache-storage-backend-extra-config "
        "kv-offloading-backend",
        harmless=f"{OFF}|native",
    ),
    ForeignFlags(
        "write --max-total-tokens TOKENS instead",
        valued="num-gpu-blocks-override kv-cache-memory-bytes kv-cache-memory",
        harmless="None",
    ),
    ForeignFlags(
        "weights stay on the device: raise --tp-size or --pp-size instead",
        valued="cpu-offload-gb",
        harmless="0|0.0",
    ),
    ForeignFlags(
        "write --verify-transfer full instead",
        switches="disaggregation-enable-kv-checksum",
        harmless=OFF,
    ),
    ForeignFlags(
        "priorities are always heeded: write --schedule-low-priority-values-first instead of "
        "`priority`",
        valued="scheduling-policy",
        harmless="fcfs",
    ),
    ForeignFlags(
        "the checkpoint says how its weights are stored, and none are quantised while they are "
        "loaded: leave it out",
        valued="quantization torchao-config quantization-param-path modelopt-quant",
        harmless=OFF,
    ),
    ForeignFlags(
        "the checkpoint is a local directory: fetch that revision, and name its directory",
        valued="revision code-revision tokenizer-revision",
        harmless="None",
    ),
    ForeignFlags(
        "write it into the config.json of the checkpoint",
        valued="hf-overrides hf-config-path rope-scaling rope-theta json-model-override-args "
        "mamba-ssm-dtype mamba-ssm-cache-dtype",
        harmless="None|{}",
    ),
    ForeignFlags(
        "only texts are generated",
        switches="is-embedding",
        valued="task runner convert",
        harmless=f"generate|auto|{OFF}",
    ),
    ForeignFlags(
        "the models and tokenizers are Baton's own: leave it out",
        valued="model-impl tokenizer-mode config-format",
        harmless="auto|hf|fast|vllm|sglang",
    ),
    ForeignFlags(
        "the defaults of sampling are OpenAI's: send what the checkpoint recommends in requests",
        valued="generation-config sampling-defaults override-generation-config "
        "preferred-sampling-params",
        harmless="vllm|openai|None",
    ),
    ForeignFlags(
        "send chat_template_kwargs in each request",
        valued="default-chat-template-kwargs",
        harmless="None|{}",
    ),
    ForeignFlags(
        "send stream_options with include_usage in each request",
        switches="enable-force-include-usage",
        harmless=OFF,
    ),
    ForeignFlags(
        "a template is the checkpoint's, or one file for --chat-template",
        switches="trust-request-chat-template",
        valued="hf-chat-template-name completion-template chat-template-content-format "
        "response-role",
        harmless=f"auto|assistant|{OFF}",
    ),
    ForeignFlags(
        "no adapters are served: merge one into the checkpoint",
        switches="enable-lora enable-lora-bias fully-sharded-loras",
        valued="max-loras max-cpu-loras max-lora-rank lora-dtype lora-backend max-loras-per-batch "
        "max-loaded-loras",
        listed="lora-paths lora-modules lora-target-modules",
        harmless=OFF,
    ),
    ForeignFlags(
        "HTTP is not encrypted here: put a proxy that ends TLS in front, on this machine",
        valued="ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers",
        switches="enable-ssl-refresh",
        harmless=OFF,
    ),
    ForeignFlags(
        "the HTTP API has its own paths on --host and --port: let a proxy in front change that",
        valued="root-path fastapi-root-path uds middleware",
        switches="grpc-mode disable-fastapi-docs",
        harmless=OFF,
    ),
    ForeignFlags(
        "this is not offered: leave it out",
        switches="enable-return-hidden-states enable-return-routed-experts enable-memory-saver "
        "enable-custom-logit-processor enable-deterministic-inference enable-sleep-mode "
        "skip-tokenizer-init allow-auto-truncate disable-sliding-window",
        valued="kv-events-config tool-server tool-parser-plugin",
        listed="logits-processors",
        harmless=OFF,
    ),
)


def foreign_flags_of(role: Role) -> dict[str, ForeignFlag]:
    """By the names without the dashes."""
    return {
        name: ForeignFlag(takes, row)
        for row in (*ROLES, *HARMLESS, *REFUSED)
        if row.role in (None, role)
        for name, takes in row.names.items()
    }
