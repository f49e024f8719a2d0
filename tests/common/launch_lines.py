"""Commands that start SGLang and vLLM in their documentation, and what they mean here.

Copied as they stand: what follows the program, with DIR for the checkpoint and addresses for
variables of the shell.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from common.config import Role

PEER = "--prefill 127.0.0.1:8998"


@dataclass(frozen=True, slots=True)
class Line:
    """source: the page it stands on. added: what our decode server needs besides.
    settings: those of the configuration that are not their defaults. remarks: how flags begin that
    change nothing, in the order of the line.
    """

    source: str
    role: Role
    text: str
    added: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(f"{self.text} {self.added}")


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """refused: the flags that end the start, in the order of the line, each with a word of what to
    write instead. cured: settings of what is left when those are left out."""

    source: str
    role: Role
    text: str
    refused: tuple[tuple[str, str], ...]
    added: str = ""
    cured: dict[str, object] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return shlex.split(f"{self.text} {self.added}")


SGLANG_PD = "SGLang, PD disaggregation"
SGLANG_ARGUMENTS = "SGLang, server arguments"
VLLM_NIXL = "vLLM, NixlConnector usage"
VLLM_NIXL_TEST = "vLLM, accuracy test of NixlConnector"
VLLM_P2P = "vLLM, disagg_example_p2p_nccl_xpyd.sh"
VLLM_MOONCAKE = "vLLM, MooncakeConnector usage"

SGLANG_PREFILL = Line(
    SGLANG_PD,
    Role.PREFILL,
    "--model-path DIR --disaggregation-mode prefill --port 30000 "
    "--disaggregation-ib-device mlx5_roce0",
    remarks=("--disaggregation-mode prefill", "--disaggregation-ib-device mlx5_roce0"),
)
VLLM_DECODE = Line(
    VLLM_NIXL,
    Role.DECODE,
    "DIR --port 8200 --enforce-eager --kv-transfer-config "
    """'{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}'""",
    added=PEER,
    settings={"port": 8200, "disable_cuda_graph": True, "prefill": ("127.0.0.1:8998",)},
    remarks=('--kv-transfer-config {"kv_connector":',),
)
_P2P = (
    "DIR --enforce-eager --host 0.0.0.0 --port 20003 --tensor-parallel-size 1 --seed 1024 "
    "--dtype float16 --max-model-len 10000 --max-num-batched-tokens 10000 --max-num-seqs 256 "
    "--trust-remote-code --gpu-memory-utilization 0.9 --kv-transfer-config "
    """'{"kv_connector":"P2pNcclConnector","kv_role":"%s","kv_port":"21001"}'"""
)
_P2P_SETTINGS = {
    "host": "0.0.0.0", "port": 20003, "dtype": "float16", "context_length": 10000,
    "chunked_prefill_size": 10000, "max_running_requests": 256, "mem_fraction_static": 0.9,
    "disable_cuda_graph": True,
}  # fmt: skip
_P2P_REMARKS = ("--seed 1024", "--trust-remote-code", "--kv-transfer-config {")

LINES = (
    SGLANG_PREFILL,
    VLLM_DECODE,
    Line(
        SGLANG_PD,
        Role.DECODE,
        "--model-path DIR --disaggregation-mode decode --port 30001 --base-gpu-id 1 "
        "--disaggregation-ib-device mlx5_roce0",
        added=PEER,
        settings={"base_gpu_id": 1, "prefill": ("127.0.0.1:8998",)},
        remarks=("--disaggregation-mode decode", "--disaggregation-ib-device mlx5_roce0"),
    ),
    Line(
        SGLANG_PD,
        Role.PREFILL,
        "--model-path DIR --disaggregation-mode prefill --port 30000 "
        "--disaggregation-transfer-backend nixl",
        remarks=("--disaggregation-mode prefill", "--disaggregation-transfer-backend nixl"),
    ),
    Line(
        SGLANG_PD,
        Role.PREFILL,
        "--model-path DIR --disaggregation-transfer-backend ascend --disaggregation-mode prefill "
        "--host 10.0.0.1 --port 30000 --trust-remote-code --dist-init-addr 10.0.0.1:5000 "
        "--nnodes 1 --node-rank 0 --tp-size 16",
        settings={"host": "10.0.0.1", "dist_init_addr": "10.0.0.1:5000", "tp_size": 16},
        remarks=(
            "--disaggregation-transfer-backend ascend",
            "--disaggregation-mode prefill",
            "--trust-remote-code",
        ),
    ),
    Line(
        SGLANG_ARGUMENTS,
        Role.DECODE,
        "--model-path DIR --tp 4 --dist-init-addr sgl-dev-0:50000 --nnodes 2 --node-rank 1 "
        "--enable-p2p-check --mem-fraction-static 0.7 --chunked-prefill-size 4096",
        added="--prefill none",
        settings={
            "tp_size": 4, "dist_init_addr": "sgl-dev-0:50000", "nnodes": 2, "node_rank": 1,
            "mem_fraction_static": 0.7, "chunked_prefill_size": 4096,
        },
        remarks=("--enable-p2p-check",),
    ),
    Line(
        VLLM_NIXL,
        Role.PREFILL,
        "DIR --port 8100 --enforce-eager --kv-transfer-config "
        """'{"kv_connector":"NixlConnector","kv_role":"kv_both"}'""",
        settings={"port": 8100, "disable_cuda_graph": True},
        remarks=("--kv-transfer-config {",),
    ),
    Line(
        VLLM_NIXL,
        Role.PREFILL,
        "DIR --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both "
        "--kv-transfer-config.kv_connector_extra_config.backends+ LIBFABRIC",
        remarks=(
            "--kv-transfer-config.kv-connector NixlConnector",
            "--kv-transfer-config.kv-role kv_both",
            "--kv-transfer-config.kv-connector-extra-config.backends+ LIBFABRIC",
        ),
    ),
    Line(
        VLLM_NIXL,
        Role.PREFILL,
        "DIR --port 8000 --tensor-parallel-size 8 --kv-transfer-config "
        """'{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'""",
        settings={"port": 8000, "tp_size": 8},
        remarks=("--kv-transfer-config {",),
    ),
    Line(
        VLLM_NIXL_TEST,
        Role.DECODE,
        "DIR --port 8200 --enforce-eager --block-size 128 --gpu-memory-utilization 0.2 "
        "--tensor-parallel-size 2 --kv-transfer-config "
        """'{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'""",
        added=PEER,
        settings={
            "port": 8200, "disable_cuda_graph": True, "page_size": 128, "tp_size": 2,
            "mem_fraction_static": 0.2, "prefill": ("127.0.0.1:8998",),
        },
        remarks=("--kv-transfer-config {",),
    ),
    Line(VLLM_P2P, Role.PREFILL, _P2P % "kv_producer", "", _P2P_SETTINGS, _P2P_REMARKS),
    Line(
        VLLM_P2P,
        Role.DECODE,
        _P2P % "kv_consumer",
        PEER,
        _P2P_SETTINGS | {"prefill": ("127.0.0.1:8998",)},
        _P2P_REMARKS,
    ),
    Line(
        VLLM_MOONCAKE,
        Role.DECODE,
        "DIR --port 8020 --kv-transfer-config "
        """'{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}'""",
        added=PEER,
        settings={"port": 8020, "prefill": ("127.0.0.1:8998",)},
        remarks=("--kv-transfer-config {",),
    ),
    Line(
        "vLLM, underscores, short names and human numbers",
        Role.DECODE,
        "--model DIR -tp 2 -pp=2 --max_model_len 32K --max_num_batched_tokens=4.096k "
        "--enable_auto_tool_choice --tool-call-parser hermes --no-enable-prefix-caching "
        "--no-async-scheduling --enable-log-requests --kv_cache_dtype fp8 --dtype half "
        "--tokenizer DIR --data-parallel-size 1 --scheduling-policy fcfs",
        added="--prefill none",
        settings={
            "tp_size": 2, "pp_size": 2, "context_length": 32768, "chunked_prefill_size": 4096,
            "tool_call_parser": "hermes", "disable_radix_cache": True, "dtype": "float16",
            "disable_overlap_schedule": True, "log_requests": True,
            "kv_cache_dtype": "float8_e4m3fn",
        },
        remarks=("--enable-auto-tool-choice", "--data-parallel-size 1", "--scheduling-policy fcfs"),
    ),
)  # fmt: skip

_DEEPSEEK = (
    "--model-path DIR --disaggregation-ib-device mlx5_0 --disaggregation-mode {mode} "
    "--host 10.0.0.1 --port {port} --trust-remote-code --dist-init-addr 10.0.0.1:5000 --nnodes 2 "
    "--node-rank {rank} --tp-size 16 --dp-size 8 --enable-dp-attention --moe-a2a-backend deepep "
    "--mem-fraction-static 0.8"
)
_DEEPSEEK_SETTINGS = {
    "host": "10.0.0.1", "dist_init_addr": "10.0.0.1:5000", "nnodes": 2, "tp_size": 16,
    "mem_fraction_static": 0.8,
}  # fmt: skip
_NO_DP = (("--dp-size 8", "no data parallel ranks"), ("--enable-dp-attention", "leave it out"))

REFUSED_LINES = (
    RefusedLine(
        SGLANG_PD,
        Role.PREFILL,
        _DEEPSEEK.format(mode="prefill", port=30000, rank=1),
        _NO_DP,
        cured=_DEEPSEEK_SETTINGS | {"node_rank": 1},
    ),
    RefusedLine(
        SGLANG_PD,
        Role.DECODE,
        _DEEPSEEK.format(mode="decode", port=30001, rank=0) + " --max-running-requests 128",
        _NO_DP,
        added="--prefill 10.0.0.9:8998",
        cured=_DEEPSEEK_SETTINGS | {"max_running_requests": 128, "prefill": ("10.0.0.9:8998",)},
    ),
    RefusedLine(
        "SGLang, LWS based PD deploy",
        Role.PREFILL,
        "--port 30000 --host 0.0.0.0 --model-path DIR --disaggregation-ib-device mlx5_bond_0,"
        "mlx5_bond_1 --chunked-prefill-size 524288 --max-prefill-tokens 32768 --page-size 64 "
        "--ep-dispatch-algorithm dynamic --eplb-algorithm deepseek --enable-dp-lm-head "
        "--enable-dp-attention --dp-size 16 --disable-radix-cache --moe-a2a-backend deepep "
        "--disaggregation-mode prefill --mem-fraction-static 0.7 --context-length 32768 --tp 16 "
        "--dist-init-addr 10.0.0.1:20102 --nnodes 2 --node-rank 0 --trust-remote-code "
        "--ep-num-redundant-experts 32 --moe-dense-tp-size 1 --max-running-requests 1024",
        (("--enable-dp-lm-head", ""), ("--enable-dp-attention", ""), ("--dp-size 16", "servers")),
        cured={
            "host": "0.0.0.0", "chunked_prefill_size": 524288, "page_size": 64, "nnodes": 2,
            "disable_radix_cache": True, "mem_fraction_static": 0.7, "context_length": 32768,
            "tp_size": 16, "dist_init_addr": "10.0.0.1:20102", "max_running_requests": 1024,
        },
    ),
    RefusedLine(
        SGLANG_PD,
        Role.PREFILL,
        "--model-path DIR --disaggregation-mode decode --port 30001",
        (("--disaggregation-mode decode", "`python -m decode_server` is the decode server"),),
        cured={"port": 30001},
    ),
    RefusedLine(
        SGLANG_PD,
        Role.DECODE,
        "--model-path DIR --disaggregation-mode prefill --port 30000",
        (("--disaggregation-mode prefill", "`python -m prefill_server` is the prefill server"),),
        added="--prefill none",
        cured={"port": 30000},
    ),
    RefusedLine(
        VLLM_NIXL,
        Role.PREFILL,
        """DIR --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'""",
        (("--kv-transfer-config", "`python -m decode_server`"),),
    ),
    RefusedLine(
        VLLM_NIXL,
        Role.DECODE,
        "DIR --kv-transfer-config.kv_role kv_producer",
        (("--kv-transfer-config.kv-role kv_producer", "`python -m prefill_server`"),),
        added="--prefill none",
    ),
    RefusedLine(
        "vLLM, disaggregated prefilling",
        Role.DECODE,
        """DIR --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'""",
        (("--kv-transfer-config", "--host-cache-gb"),),
        added="--prefill none",
    ),
    RefusedLine(
        "SGLang, hierarchical cache and LoRA",
        Role.DECODE,
        "--model-path DIR --enable-hierarchical-cache --hicache-size 30 --hicache-write-policy "
        "write_through --lora-paths a=/x b=/y --quantization fp8",
        (
            ("--enable-hierarchical-cache", "--host-cache-gb GIB"),
            ("--hicache-size 30", "--host-cache-gb GIB"),
            ("--hicache-write-policy write_through", "--host-cache-gb"),
            ("--lora-paths 'a=/x b=/y'", "no adapters"),
            ("--quantization fp8", "the checkpoint says"),
        ),
        added="--prefill none",
    ),
)  # fmt: skip
