"""What one server was asked to be: the checked settings of a prefill or a decode server.

Every process of a server gets the same `ServerConfig`, as a JSON file in the server's private
runtime directory. How settings are written on a command line or in a file is the business of
`common/flags`; nothing here reads flags.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

import msgspec

from common.errors import ConfigError
from common.speculative import DEFAULT_DRAFT_P_MIN, SpeculativeAlgorithm, proposal_max
from common.weights import DEFAULT_VERSION

DEFAULT_BOOTSTRAP_PORT = 8998
DEFAULT_MAX_RUNNING_REQUESTS = 256
"""Where the flag is not given and no cache holds a state per request, which would say less."""
DEFAULT_HEARTBEAT_INTERVAL_S = 0.2
DEFAULT_PEER_TIMEOUT_S = 0.8
DEFAULT_WORKER_TIMEOUT_S = 1.0
DEFAULT_CPU_STALL_S = 2.0
DEFAULT_GPU_STALL_S = 10.0
DEFAULT_SELF_TEST_INTERVAL_S = 30.0
DEFAULT_BOOTSTRAP_TIMEOUT_S = 30.0
"""How long half of a routed request waits. Short: the other half may never come, as when a router
tried again elsewhere. It may be early by the time in its decode server's queue."""
DEFAULT_TRACE_ENDPOINT = "http://127.0.0.1:4318/v1/traces"
# What --host says to listen on every address.
ANY_HOST = ("0.0.0.0", "::")
# Settings that are shown to no client.
SECRET_FIELDS = ("api_keys", "admin_api_keys")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class EngineType(StrEnum):
    """The `engine_type` label of every metric; unified is a decode server without prefill peers."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class TransferMode(StrEnum):
    """How caches travel: straight into pages, through staging buffers, or whichever is faster."""

    AUTO = "auto"
    DIRECT = "direct"
    STAGED = "staged"


class MetricsNames(StrEnum):
    """Whose names /metrics uses for what other servers measure as well."""

    SGLANG = "sglang"
    VLLM = "vllm"
    BOTH = "both"


class Verify(StrEnum):
    """What of a cache is digested on both sides and compared before it is used."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


class ReturnCache(StrEnum):
    """Whether the cache of a turn that has ended on a decode server goes back to the prefill server
    that computed its prompt.

    auto: where both servers want it and keep prefixes.
    """

    OFF = "off"
    AUTO = "auto"


class LocalPrefill(StrEnum):
    """Which prompts a decode server with prefill servers computes itself; each level has those
    before it.

    auto: short rests of prompts whose beginning is cached here, where that is quicker than asking
    for them. fallback: whole prompts too, if no prefill server can be found for them.
    """

    OFF = "off"
    AUTO = "auto"
    FALLBACK = "fallback"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one server, checked by `to_config`; None means: decided at start.

    model_path, tokenizer_path: absolute directories. served_model_name: what clients call it, and
        what answers say; model_aliases: what clients may call it as well.
    chat_template: file of a Jinja template in place of the checkpoint's; "": that one.
    weight_version: what the operator calls the weights, as long as no others are loaded.
    name: what its peers call it; "": its HTTP address.
    prefill: where the prefill servers' bootstrap ports are: entries as `prefill_entries.py` reads
        them; empty: the server serves alone.
    bootstrap_allow: hosts, patterns and networks that a request's bootstrap_host may name.
    device: "auto" is CUDA where torch sees a GPU, else the CPU; workers decide it at start.
    base_gpu_id: the GPU of this machine's first rank; the others take those after it.
    dtype, kv_cache_dtype: "auto" follows the checkpoint and the weights.
    nnodes, node_rank: machines that the ranks are spread over evenly, and which of them this is;
        machine 0 has the frontend and the scheduler. dist_init_addr: "host:port" of machine 0,
        where the ranks meet; its next port is where their workers find the scheduler.
    attention_backend: "auto" is FlashInfer on CUDA for the kinds of layers that it is right about;
        "sdpa" is torch whatever the layers are; "flashinfer" starts only if all layers can use it.
    chunked_prefill_size: prompt tokens per forward pass, a multiple of page_size.
    max_running_requests: None: as many as a pool without states allows, or as have room for theirs.
    max_checkpoints: ends of prefixes that are kept with slots, tails and windows of their own, so
        that later requests go on from there; None: as many as running requests, as far as a share
        of the pool holds them.
    max_total_tokens: tokens the KV pool holds. mem_fraction_static: share of free memory that
        weights and pool may take where max_total_tokens is not given.
    host_cache_gb: GiB of host memory, of all ranks together, for cached prefixes that leave the
        pool; 0: none.
    disable_cuda_graph: launch every kernel of a decode pass by itself. cuda_graph_max_bs: largest
        batch whose decode passes are recorded; None: as many requests as may run.
    schedule_low_priority_values_first: of the priorities in bodies, smaller ones are more urgent.
    disable_overlap_schedule: send no step before the last one has returned; so it is with more than
        one pipeline stage, of which all but the last learn drawn tokens with the next step.
    speculative_algorithm: who proposes tokens ahead; with any, no step is sent before the last one
        has returned. speculative_draft_model_path: of the draft that has a checkpoint of its own.
        speculative_num_steps, speculative_num_draft_tokens: how many are proposed,
        and how many tokens a step verifies of a sequence, its latest one included; None: what
        follows from the other one, or the default. speculative_draft_p_min: how likely all of a
        draft's guesses have to be right for the next one to be proposed.
    cpu_thread_count: threads that one worker computes with on a CPU; None: half of the cores,
        shared by the ranks, so that a pair on one machine does not fight over them.
    transport: "auto" is UCX over shared memory, CUDA IPC and RDMA, and a stream of our own where
        none of these reaches a peer; "shm" is shared memory alone; "stream" streams alone;
        "ucx-tcp" is UCX over tcp, and any process that reaches its ports
        can write anywhere in a worker.
    transfer_ports: "first-last" port that workers may listen on for caches; "": any.
    net_devices: which network devices UCX may use. ucx: which libucp is loaded: "auto", "wheel",
        "system", or a directory.
    transfer_mode: "auto" stages a transfer where that is faster or its element types differ;
        "direct" never does; "staged" always does, so that the KV pool is not writable from outside.
    verify_transfer: how much of every cache that was transferred is compared with what was sent;
        the stricter of two servers decides.
    staging_buffer_mb: MiB of the staging buffer in which staged transfers arrive, of each rank that
        receives caches.
    api_keys, admin_api_keys: what HTTP clients must show, from flags, files and environment alike;
        empty: nothing is asked. The admin ones also open what changes the server's state.
    local_prefill: what a decode server computes itself. Without "fallback" a prompt for which no
        prefill server can be found is answered 503.
    return_cache: whether caches of answers go back to prefill servers.
    self_test_interval_s: a decode server that was handed nothing for so long tries one token, and
        another one right after it was connected; 0: never.
    bootstrap_timeout_s: how long half of a routed request waits for the other on a prefill server.
    heartbeat_interval_s, peer_timeout_s: how often peers are told that this server lives, and how
        long one may be silent; the same on all servers.
    worker_timeout_s: how long a worker process may be silent. Its I/O thread beats while the engine
        computes, but shares the interpreter with it: measured on 2 cores with a load of 14, it was
        late by 0.44 s at most.
    stall_timeout_s: how long the engine of a worker may stand still in a step; None: 2 s
        on a CPU, whose engine tells of every layer, 10 s on a GPU, which tells of every step.
    allowed_hosts: names that clients may use for this server; empty: any, but only those of this
        machine where it listens on a loopback address. allowed_origins: web pages that may use it
        from a browser, "*" for all.
    curve_secret_key_file, curve_peer_keys_file: our key pair and the keys of our peers on the
        control channel; "": it is open.
    enable_trace, otlp_traces_endpoint: whether and where OpenTelemetry spans are sent; an endpoint
        alone is enough.
    request_history: requests that have ended and are still told of.
    metrics_names: whose names /metrics uses for what SGLang and vLLM measure as well.
    strict_fields: a body with a field that is unknown is refused.
    tool_call_parser, reasoning_parser: how the model writes calls of tools and reasoning; "": they
        are left in the text.
    request_timeout_s: longest life of one request. drain_timeout_s: how long a stopping server
        waits for open requests.
    enable_role_switch: its workers are made for both roles, so that the server can go on in the
        other one without loading weights again. standby: it serves in none until it is told one.
    relay_timeout_s: how long after that a stopping decode server stays for requests that other ones
        have taken over; 0: none are moved. drain_to: URLs of those servers; empty: the decode
        servers that its prefill servers know.
    serve_plain: a prefill server has its decode servers answer requests that name no room.
    remarks: lines for the log, on flags of other servers that change nothing here.
    runtime_dir: private directory (0700) of the local sockets and of this file, made by the
        supervisor; "" until then.
    """

    role: Role
    model_path: str
    tokenizer_path: str
    served_model_name: str
    port: int
    model_aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    name: str = ""
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    prefill: tuple[str, ...] = ()
    bootstrap_allow: tuple[str, ...] = ("any",)
    device: str = "auto"
    base_gpu_id: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    page_size: int = 16
    chunked_prefill_size: int = 2048
    max_running_requests: int | None = None
    max_checkpoints: int | None = None
    max_queued_requests: int = 1024
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.85
    host_cache_gb: float = 0.0
    context_length: int | None = None
    load_format: str = "auto"
    weight_version: str = DEFAULT_VERSION
    quantized_weights: str = "auto"
    log_level: str = "info"
    log_requests: bool = False
    metrics_names: MetricsNames = MetricsNames.SGLANG
    request_history: int = 256
    enable_trace: bool = False
    otlp_traces_endpoint: str = ""
    random_seed: int = 0
    tp_size: int = 1
    pp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
    layer_group_count: int = 1
    cpu_thread_count: int | None = None
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    disable_overlap_schedule: bool = False
    schedule_low_priority_values_first: bool = False
    speculative_algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.OFF
    speculative_draft_model_path: str = ""
    speculative_num_steps: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_eagle_topk: int = 1
    speculative_draft_p_min: float = DEFAULT_DRAFT_P_MIN
    transport: str = "auto"
    transfer_ports: str = ""
    net_devices: str = "all"
    transfer_mode: TransferMode = TransferMode.AUTO
    verify_transfer: Verify = Verify.OFF
    staging_buffer_mb: int = 64
    ucx: str = "auto"
    local_prefill: LocalPrefill = LocalPrefill.AUTO
    return_cache: ReturnCache = ReturnCache.AUTO
    self_test_interval_s: float = DEFAULT_SELF_TEST_INTERVAL_S
    bootstrap_timeout_s: float = DEFAULT_BOOTSTRAP_TIMEOUT_S
    request_timeout_s: float = 600.0
    heartbeat_interval_s: float = DEFAULT_HEARTBEAT_INTERVAL_S
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    stall_timeout_s: float | None = None
    max_body_nbytes: int = 32 << 20
    strict_fields: bool = False
    drain_timeout_s: float = 30.0
    relay_timeout_s: float = 0.0
    drain_to: tuple[str, ...] = ()
    serve_plain: bool = False
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    admin_api_keys: tuple[str, ...] = ()
    admin_api_key_file: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    curve_secret_key_file: str = ""
    curve_peer_keys_file: str = ""
    chat_template: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    enable_role_switch: bool = False
    standby: bool = False
    remarks: tuple[str, ...] = ()
    runtime_dir: str = ""

    def stall_s(self, device: str) -> float:
        """stall_timeout_s, or what fits the device that the workers compute on."""
        if self.stall_timeout_s is not None:
            return self.stall_timeout_s
        return DEFAULT_CPU_STALL_S if device == "cpu" else DEFAULT_GPU_STALL_S

    @property
    def proposal_max(self) -> int:
        """Tokens that are proposed ahead of a sequence in a step at most; 0: nothing is."""
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        return proposal_max(self.speculative_algorithm, steps, tokens)

    @property
    def digest_lookahead(self) -> int:
        """Tokens behind the beginning of a prompt that its cache depends on."""
        return 1 if self.speculative_algorithm.has_draft else 0

    @property
    def verified_max(self) -> int:
        """Proposals for a sequence that its workers verify in a step; 0 where none decode."""
        decodes = self.role is Role.DECODE or self.enable_role_switch
        return self.proposal_max if decodes else 0

    @property
    def trace_endpoint(self) -> str:
        """Where spans are sent; "" for nowhere."""
        return self.otlp_traces_endpoint or (DEFAULT_TRACE_ENDPOINT if self.enable_trace else "")

    @property
    def http_address(self) -> str:
        """ "host:port" where others find its HTTP API, the host's name if it listens everywhere."""
        host = gethostname() if self.host in ANY_HOST else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def engine_type(self) -> EngineType:
        if self.role is Role.PREFILL:
            return EngineType.PREFILL
        return EngineType.DECODE if self.prefill else EngineType.UNIFIED

    @property
    def returns_caches(self) -> bool:
        """Whether caches of answers go back from here, or to here, where a peer wants that too."""
        has_peers = self.role is Role.PREFILL or bool(self.prefill)
        is_on = self.return_cache is not ReturnCache.OFF
        return has_peers and is_on and not self.disable_radix_cache

    @property
    def sends_caches(self) -> bool:
        return self.role is Role.PREFILL or self.returns_caches or self.enable_role_switch

    @property
    def receives_caches(self) -> bool:
        is_target = self.role is Role.DECODE and bool(self.prefill)
        return is_target or self.returns_caches or self.enable_role_switch

    @property
    def transfer_port_range(self) -> tuple[int, int]:
        """The first and the last of `transfer_ports`; (0, 0): any."""
        first, _, last = self.transfer_ports.partition("-")
        return int(first or 0), int(last or 0)

    @property
    def rank_count(self) -> int:
        """Workers of this server, one per (pipeline stage, tensor parallel rank)."""
        return self.tp_size * self.pp_size

    @property
    def local_ranks(self) -> range:
        """Global ranks of the workers on this machine."""
        count = self.rank_count // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def scheduler_address(self) -> str:
        """ "host:port" where workers of other machines find the scheduler; "" if there are none."""
        if self.nnodes == 1:
            return ""
        host, _, port = self.dist_init_addr.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @property
    def scheduler_ipc_path(self) -> str:
        """File system path of the scheduler's local socket."""
        return str(self._in_runtime_dir("scheduler.sock"))

    @property
    def scheduler_ipc(self) -> str:
        """The scheduler's local socket as ZMQ spells it."""
        return f"ipc://{self.scheduler_ipc_path}"

    @property
    def frontend_ipc_path(self) -> str:
        """File system path of the scheduler's socket for its frontend."""
        return str(self._in_runtime_dir("frontend.sock"))

    @property
    def config_path(self) -> str:
        """Where the supervisor leaves this record for the other processes."""
        return str(self._in_runtime_dir("config.json"))

    def _in_runtime_dir(self, name: str) -> Path:
        assert self.runtime_dir, "the supervisor sets runtime_dir before any process starts"
        return Path(self.runtime_dir) / name


def shown_settings(config: ServerConfig) -> dict[str, object]:
    """Everything but secrets: the number of keys, and of a collector's URL where it leads."""
    settings = msgspec.structs.asdict(config)
    url = urlsplit(config.otlp_traces_endpoint)
    where = url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="")
    counts = {name: f"{len(settings[name])} set" for name in SECRET_FIELDS}
    return {**settings, **counts, "otlp_traces_endpoint": where.geturl()}


def write_config(config: ServerConfig) -> None:
    """Write `config` to its `config_path`, readable by this user only."""
    path = Path(config.config_path)
    path.touch(mode=0o600, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def read_config(path: str) -> ServerConfig:
    """Raises: ConfigError if the file can't be read or is not a ServerConfig."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=ServerConfig)
    except OSError as exc:
        raise ConfigError(f"config file {path!r} can't be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {path!r} is not a server's settings: {exc}") from exc
