"""From a config to a started rank: the model, its memory, its transport, and its WorkerReady.

Runs before any thread does. Knows nothing of steps or transfers.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.clock import Clock
from common.config import ServerConfig
from common.engine.attention.choose import AttentionChoice, choose_attention
from common.engine.cache.cast import CACHE_DTYPES
from common.engine.config.draft import DraftConfig, split_stages
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.distributed import ParallelContext
from common.engine.draft_loader import read_draft
from common.engine.heap import keep_freed_memory
from common.engine.layers.choose_fused import choose_fused
from common.engine.loader import attention_shape, fused_shape, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm
from common.engine.models.registry import cache_components
from common.engine.speculation.choose import choose_proposer
from common.environment import shared_memory_dir
from common.errors import ConfigError, GrammarError
from common.grammar import GrammarCompiler
from common.layout.cache_layout import RankLayout, ServerLayout
from common.protocol.codec import encode_layout
from common.protocol.worker import WorkerReady
from common.transport.transport import Transport
from common.weights import ServedWeights
from common.worker.digester import Digester
from common.worker.first_pass import first_pass_tokens, warm_up
from common.worker.host_page_counts import check_host_memory, host_share_nbytes
from common.worker.host_pages import HostPages, start_host_pages
from common.worker.pools import (
    FreeMemory,
    allocate_pool,
    decide_pool_size,
    free_nbytes,
    with_spares,
)
from common.worker.staging.source import StagingSource
from common.worker.staging.start import start_source, start_target
from common.worker.staging.target import StagingTarget
from common.worker.start_device import device_of, enough_memory, with_device
from common.worker.start_graphs import plan_graphs, start_graphs, why_not_recorded
from common.worker.start_transport import PRIVATE_TRANSPORTS, start_transport
from common.worker.weights import RankModel, WeightLoader

log = logging.getLogger(__name__)

RANKS_MEET_TIMEOUT_S = 120.0
"""How long the ranks of a server wait for each other before any of them loads weights."""

PASS_TIMEOUT_S = 1800.0
"""How long a rank waits for another inside a pass. Before the first pass, loading weights and
compiling kernels may take one rank minutes longer than another. `--stall-timeout` detects ranks
that hang later."""

STATIC_KEYS = ("transport", "ucx_version", "ucx_origin", "ucx_directory", "tls", "stream")
"""Keys of a transport's description that do not change after the start."""

MORE_ROOM_FOR_PASSES = "lower --mem-fraction-static, --max-total-tokens or --chunked-prefill-size"


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A started rank, for the threads of its worker."""

    device: torch.device
    layout: RankLayout
    runner: ModelRunner
    transport: Transport
    page_counts: list[int]
    staging_target: StagingTarget | None
    staging_source: StagingSource | None
    digester: Digester
    host_pages: HostPages
    weights: WeightLoader
    ready: WorkerReady


def start_rank(config: ServerConfig, rank: int, clock: Clock) -> StartedRank:
    """Load, allocate, touch and try everything once.

    Raises: ConfigError that names the setting or file at fault.
    """
    config = with_device(config, rank)
    device = device_of(config, rank)
    _set_up_process(config, device)
    model_config = read_served_config(config.model_path, dtype=config.dtype)
    context_length = _context_length(config, model_config)
    draft = _read_draft(config, model_config)
    layout = _server_layout(config, model_config, draft).ranks[rank]
    before_nbytes = free_nbytes(device)
    # Before the ranks meet, none has taken its share: all shares must be free at once.
    check_host_memory(config, len(config.local_ranks) * host_share_nbytes(config))
    parallel = _meet_other_ranks(config, rank, device)
    choice = _choose_attention(config, model_config, parallel, device, draft)
    source = RankModel(config, device, parallel, choice, draft)
    model = source.load()
    now_nbytes = free_nbytes(device)
    plan = plan_graphs(config, model, layout, choice, context_length)
    free = FreeMemory(before_nbytes, now_nbytes, _shared_nbytes(config, device), plan.nbytes)
    size = decide_pool_size(layout, config, context_length, free)
    page_counts = size.page_counts
    transport = start_transport(config, device)
    # Ranks have to verify the same proposals.
    spare_count = parallel.least(size.spare_count, device)
    pool = allocate_pool(transport, layout, with_spares(layout, page_counts, spare_count), device)
    host_pages = start_host_pages(config, pool)
    staging_source = start_source(config, transport, layout, pool, clock)
    staging_target = start_target(config, transport, layout, pool)
    grammars = _grammars(config, model_config) if model.head is not None else None
    record = partial(start_graphs, plan, pool=pool, choice=choice, context_length=context_length)
    graphs, plan = record(model)
    proposer = choose_proposer(config.speculative_algorithm) if config.verified_max else None
    p_min = config.speculative_draft_p_min
    runner = ModelRunner(model, pool, clock, grammars, graphs, proposer, spare_count, p_min)
    with enough_memory("a first pass", MORE_ROOM_FOR_PASSES):
        tokens = first_pass_tokens(config, context_length, layout, page_counts, device, parallel)
        times = warm_up(runner, layout, model_config.vocab_size, tokens)
    ready = WorkerReady(
        rank=rank,
        page_counts=page_counts,
        layout=encode_layout(layout.server),
        fingerprint=source.fingerprint(model_config, config.weight_version),
        vocab_size=model_config.vocab_size,
        context_length=context_length,
        eos_token_ids=list(model_config.eos_token_ids),
        describe=_describe(rank, model, layout, page_counts, choice, transport)
        | {"cuda_graphs": plan.summary, "checkpoints": size.checkpoints}
        | {"host_cache": host_pages.describe()},
        host_id=host_id(),
        pid=os.getpid(),
        checkpoint_max=size.checkpoint_max,
        pass_times=times,
        host_page_counts=host_pages.page_counts,
        device=device.type,
        weights=ServedWeights(config.model_path, config.load_format, config.weight_version),
    )
    loader = WeightLoader(source, model_config, runner, record, ready)
    digester = Digester(pool.buffers, layout)
    return StartedRank(
        device, layout, runner, transport, page_counts, staging_target, staging_source, digester,
        host_pages, loader, ready,
    )  # fmt: skip


def _choose_attention(
    config: ServerConfig,
    model_config: ModelConfig,
    parallel: ParallelContext,
    device: torch.device,
    draft: DraftConfig | None,
) -> AttentionChoice:
    cache_dtype = CACHE_DTYPES[cache_components(model_config, config.kv_cache_dtype)[0].dtype]
    return choose_attention(
        attention_shape(model_config, parallel, device, config.page_size, cache_dtype, draft),
        config.attention_backend,
        may_record=not why_not_recorded(config, device),
    )


def _set_up_process(config: ServerConfig, device: torch.device) -> None:
    """Set torch's threads and the allocator of this process."""
    torch.set_num_threads(_thread_count(config))
    if device.type == "cpu":
        keep_freed_memory()


def _thread_count(config: ServerConfig) -> int:
    """Threads to compute with. With more runnable threads than cores, every parallel loop waits for
    a thread that is not scheduled: tens of times slower for small models."""
    if config.cpu_thread_count is not None:
        return config.cpu_thread_count
    core_count = len(os.sched_getaffinity(0))
    return max(1, core_count // 2 // len(config.local_ranks))


def _grammars(config: ServerConfig, model_config: ModelConfig) -> GrammarCompiler:
    """Prepared before the first request: reading a large tokenizer takes longer than a step."""
    grammars = GrammarCompiler(
        config.tokenizer_path,
        model_config.vocab_size,
        model_config.eos_token_ids,
        _thread_count(config),
    )
    try:
        grammars.prepare()
    except GrammarError as error:
        log.warning("requests for structured output will be refused: %s", error)
    return grammars


def host_id() -> str:
    """Id of this boot of this host and of its pid namespace. A pid is unique within it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _meet_other_ranks(config: ServerConfig, rank: int, device: torch.device) -> ParallelContext:
    return ParallelContext.join(
        rank=rank,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=_meeting_place(config),
        meet_timeout_s=RANKS_MEET_TIMEOUT_S,
        pass_timeout_s=PASS_TIMEOUT_S,
    )


def _meeting_place(config: ServerConfig) -> str:
    """The init method of torch.distributed for the ranks of this server."""
    if config.nnodes > 1:
        return f"tcp://{config.dist_init_addr}"
    return f"file://{config.runtime_dir}/ranks"


def _read_draft(config: ServerConfig, model_config: ModelConfig) -> DraftConfig | None:
    draft_path = config.speculative_draft_model_path
    return read_draft(model_config, config.speculative_algorithm, draft_path)


def _context_length(config: ServerConfig, model_config: ModelConfig) -> int:
    if config.context_length is None:
        return model_config.context_length
    if config.context_length > model_config.context_length:
        raise ConfigError(
            f"--context-length {config.context_length}: must be in "
            f"1..{model_config.context_length}, the model's own"
        )
    return config.context_length


def _server_layout(
    config: ServerConfig, model_config: ModelConfig, draft: DraftConfig | None
) -> ServerLayout:
    check_parallel(model_config, config.tp_size, config.pp_size)
    if config.layer_group_count > model_config.layer_count:
        raise ConfigError(
            f"--layer-group-count {config.layer_group_count}: must be in "
            f"1..{model_config.layer_count}, the model's layers"
        )
    layout = ServerLayout(
        components=cache_components(model_config, config.kv_cache_dtype, draft),
        tp_size=config.tp_size,
        stages=split_stages(model_config, config.pp_size, draft),
        page_size=config.page_size,
        layer_group_count=config.layer_group_count,
    )
    layout.check()
    return layout


def _shared_nbytes(config: ServerConfig, device: torch.device) -> int | None:
    """Free shared memory for the pool of a CPU; None if the pool lies elsewhere."""
    if device.type == "cuda" or config.transport in PRIVATE_TRANSPORTS:
        return None
    directory = shared_memory_dir()
    try:
        return shutil.disk_usage(directory).free
    except OSError as exc:
        raise ConfigError(
            f"{directory} can't be used: {exc.strerror}; mount a tmpfs there, or name another "
            "directory in UCX_POSIX_DIR"
        ) from exc


def _describe(
    rank: int,
    model: CausalLm,
    layout: RankLayout,
    page_counts: list[int],
    choice: AttentionChoice,
    transport: Transport,
) -> dict[str, str]:
    context = model.context
    fused = choose_fused(fused_shape(model.config, context.parallel, context.device))
    groups = zip(layout.groups, page_counts, strict=True)
    pages = [f"{count} x {group.page_nbytes} bytes" for group, count in groups]
    return {
        **model.describe(),
        "rank": str(rank),
        "attention": f"{choice.attention.name} ({choice.reason})",
        "norms and activations": f"{'fused' if fused.kernels else 'torch'} ({fused.reason})",
        "pages": ", ".join(pages),
        "torch": str(torch.__version__),
        **{key: str(value) for key, value in transport.describe().items() if key in STATIC_KEYS},
    }
