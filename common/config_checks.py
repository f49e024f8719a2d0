"""What one setting alone can't tell: settings that go together, and files that must exist."""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.config import Role, ServerConfig
from common.errors import ConfigError, config_error
from common.speculative import SpeculativeAlgorithm


def check_config(config: ServerConfig) -> None:
    """What one setting alone can't tell: settings that go together, and files that must exist.

    Raises: ConfigError naming the flag, the value and what is allowed.
    """
    if config.chunked_prefill_size % config.page_size:
        raise ConfigError(
            f"--chunked-prefill-size {config.chunked_prefill_size}: must be a multiple of "
            f"--page-size {config.page_size}"
        )
    check_device(config)
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens}: must be at least one page, "
            f"--page-size {config.page_size}"
        )
    if config.disable_radix_cache and config.max_checkpoints:
        raise ConfigError(
            f"--max-checkpoints {config.max_checkpoints}: must be 0 with --disable-radix-cache"
        )
    if config.disable_radix_cache and config.host_cache_gb:
        raise ConfigError(
            f"--host-cache-gb {config.host_cache_gb:g}: must be 0 with --disable-radix-cache"
        )
    if config.enable_role_switch and config.nnodes > 1:
        raise ConfigError(
            f"--enable-role-switch: must not be given with --nnodes {config.nnodes}: workers of "
            "other machines end with their scheduler"
        )
    if config.standby and config.nnodes > 1:
        raise ConfigError(f"--standby: must not be given with --nnodes {config.nnodes}")
    listens = config.role is Role.PREFILL or config.enable_role_switch
    if listens and config.port == config.bootstrap_port:
        raise ConfigError(
            f"--bootstrap-port {config.bootstrap_port}: must differ from --port {config.port}"
        )
    if config.peer_timeout_s < 2 * config.heartbeat_interval_s:
        raise ConfigError(
            f"--peer-timeout {config.peer_timeout_s:g}: must be at least two heartbeats, "
            f"--heartbeat-interval {config.heartbeat_interval_s:g}"
        )
    if config.worker_timeout_s < 2 * config.heartbeat_interval_s:
        raise ConfigError(
            f"--worker-timeout {config.worker_timeout_s:g}: must be at least two heartbeats, "
            f"--heartbeat-interval {config.heartbeat_interval_s:g}"
        )
    if bool(config.curve_secret_key_file) != bool(config.curve_peer_keys_file):
        raise ConfigError(
            "--curve-secret-key-file and --curve-peer-keys-file: set both, or neither"
        )
    _check_speculation(config)
    _check_nodes(config)
    _check_model(Path(config.model_path))
    tokenizer = Path(config.tokenizer_path)
    if not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer-path {config.tokenizer_path}: must be a directory with a tokenizer.json"
        )


def check_device(config: ServerConfig) -> None:
    """Called again once `auto` is decided. Raises: ConfigError."""
    if config.device == "cuda" and config.transport not in ("auto", "ucx-tcp"):
        raise ConfigError(
            f"--transport {config.transport}: must be auto or ucx-tcp with --device cuda: neither "
            "shared memory nor streams can carry what is in a GPU's memory"
        )


def _check_speculation(config: ServerConfig) -> None:
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm is SpeculativeAlgorithm.OFF:
        return
    if algorithm is SpeculativeAlgorithm.EAGLE3 and not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--speculative-draft-model-path {path or '(none)'}: must be a directory with the "
            f"config.json of an EAGLE3 head"
        )
    if algorithm is not SpeculativeAlgorithm.EAGLE3 and path:
        raise ConfigError(
            f"--speculative-draft-model-path {path}: must not be given with "
            f"--speculative-algorithm {algorithm}"
        )
    steps, tokens = config.speculative_num_steps, config.speculative_num_draft_tokens
    if steps is not None and tokens not in (None, steps + 1):
        raise ConfigError(
            f"--speculative-num-draft-tokens {tokens}: must be {steps + 1}, one more than "
            f"--speculative-num-steps {steps}"
        )
    if config.pp_size > 1 and (config.verified_max or not algorithm.has_draft):
        raise ConfigError(
            f"--speculative-algorithm {config.speculative_algorithm}: must not be given with "
            f"--pp-size {config.pp_size}: proposals are known to the last stage only"
        )


def _check_nodes(config: ServerConfig) -> None:
    if config.rank_count % config.nnodes:
        raise ConfigError(
            f"--nnodes {config.nnodes}: must divide the {config.rank_count} ranks of "
            f"--tp-size {config.tp_size} x --pp-size {config.pp_size}"
        )
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"--node-rank {config.node_rank}: must be in 0..{config.nnodes - 1}")
    if config.nnodes > 1 and not config.dist_init_addr:
        raise ConfigError(f"--nnodes {config.nnodes}: needs --dist-init-addr host:port of node 0")


def _check_model(directory: Path) -> None:
    path = directory / "config.json"
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as exc:
        text = f"--model-path {directory}: must be a local directory with a readable config.json"
        if not directory.exists():
            text += "; names of models are not looked up, `hf download NAME --local-dir DIR` does"
        raise config_error(f"{text} ({exc.strerror})", exc) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--model-path {directory}: config.json is not JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise ConfigError(f"--model-path {directory}: config.json must hold a JSON object")
