"""How settings are written: flags in SGLang's spelling, and a YAML file that may hold all of them.

One table says for each setting its flag, its parser and its help; flags and file go through the
same parsers, and flags win. Knows nothing of roles: a role appends its own flags to `COMMON_FLAGS`.
Every error is a `ConfigError` of one line that names the flag, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import yaml

from common.config import (
    API_KEY_RULE,
    HandOver,
    ServerConfig,
    Verify,
    check_config,
    is_api_key,
    with_api_keys,
)
from common.errors import ConfigError

Value = str | int | float | bool | tuple[str, ...] | None
Settings = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. name: as in ServerConfig. parse: text to value, or ValueError("must be ...").

    spellings: without the dashes, the first one is used in messages. A switch takes no value, a
        secret one is never shown.
    """

    name: str
    spellings: tuple[str, ...]
    parse: Callable[[str], Value]
    help: str
    is_switch: bool = False
    is_secret: bool = False


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"must be an integer in {low}..{high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"must be a number in {low:g}..{high:g}")
        return value

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def text(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError("must be printable text")
    return value


def host(value: str) -> str:
    if not value or not re.fullmatch(r"[A-Za-z0-9._:%-]+", value):
        raise ValueError("must be a host name or an IP address, without scheme, port or brackets")
    return value


def address(value: str) -> str:
    """A "host:port", with an IPv6 host in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError("must be host:port with a port in 1..65535, comma separated, or `none`")
    return value


def switch(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def page_size(value: str) -> int:
    size = int(value) if re.fullmatch(r"[0-9]{1,4}", value) else 0
    if not (1 <= size <= 256 and size.bit_count() == 1):
        raise ValueError("must be a power of two in 1..256")
    return size


def ucx_origin(value: str) -> str:
    if value not in ("auto", "wheel", "system") and not Path(value).is_dir():
        raise ValueError("must be auto, wheel, system or an existing directory that holds libucp")
    return value


port = integer(1, 65535)
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_OR_DTYPES = ", ".join(_DTYPES)
_FP8_SPELLINGS = ("fp8_e4m3", "float8_e4m3fn")


def cache_dtype(value: str) -> str:
    if value in _FP8_SPELLINGS:
        return "float8_e4m3fn"
    return choice(*_DTYPES, *_FP8_SPELLINGS)(value)


def api_keys(value: str) -> tuple[str, ...]:
    keys = tuple(value.split(","))
    if not all(map(is_api_key, keys)):
        raise ValueError(f"{API_KEY_RULE}, or several of them, comma separated")
    return keys


COMMON_FLAGS: tuple[Flag, ...] = (
    Flag("model_path", ("model-path", "model"), text, "directory of the checkpoint"),
    Flag("tokenizer_path", ("tokenizer-path",), text, "directory of the tokenizer [model path]"),
    Flag(
        "served_model_name", ("served-model-name",), text, "what clients call it [directory's name]"
    ),
    Flag("host", ("host",), host, "address to listen on"),
    Flag("port", ("port",), port, "HTTP port"),
    Flag("device", ("device",), choice("cpu", "cuda"), "where the model runs: cpu or cuda"),
    Flag(
        "dtype", ("dtype",), choice(*_DTYPES), f"of weights: {_OR_DTYPES}; auto: the checkpoint's"
    ),
    Flag(
        "kv_cache_dtype",
        ("kv-cache-dtype",),
        cache_dtype,
        "of the cache: as --dtype, or fp8_e4m3 (scale 1.0); auto: the weights'",
    ),
    Flag("page_size", ("page-size",), page_size, "tokens per page, a power of two in 1..256"),
    Flag(
        "chunked_prefill_size",
        ("chunked-prefill-size",),
        integer(1, 1 << 20),
        "prompt tokens per forward pass, a multiple of the page size",
    ),
    Flag(
        "max_running_requests",
        ("max-running-requests",),
        integer(1, 4096),
        "requests computed together [256, or as many as have room for their state]",
    ),
    Flag(
        "max_queued_requests",
        ("max-queued-requests",),
        integer(1, 1 << 16),
        "requests that may wait; more are answered 503",
    ),
    Flag(
        "max_total_tokens",
        ("max-total-tokens",),
        integer(1, 1 << 40),
        "tokens the KV pool holds [from the memory fraction]",
    ),
    Flag(
        "mem_fraction_static",
        ("mem-fraction-static",),
        number(0.01, 0.99),
        "share of free memory for weights and pool",
    ),
    Flag(
        "context_length",
        ("context-length",),
        integer(1, 1 << 30),
        "longest request in tokens [the checkpoint's]",
    ),
    Flag(
        "load_format", ("load-format",), choice("auto", "dummy"), "auto or dummy (random weights)"
    ),
    Flag(
        "log_level",
        ("log-level",),
        choice("debug", "info", "warning", "error"),
        "debug, info, warning or error",
    ),
    Flag("log_requests", ("log-requests",), switch, "log every HTTP request", is_switch=True),
    Flag("random_seed", ("random-seed",), integer(0, 2**63 - 1), "seed of dummy weights"),
    Flag(
        "tp_size",
        ("tp-size", "tp", "tensor-parallel-size"),
        integer(1, 1024),
        "tensor parallel ranks",
    ),
    Flag(
        "pp_size",
        ("pp-size", "pp", "pipeline-parallel-size"),
        integer(1, 1024),
        "pipeline stages",
    ),
    Flag("nnodes", ("nnodes",), integer(1, 1024), "machines that the ranks are spread over"),
    Flag("node_rank", ("node-rank",), integer(0, 1023), "which of them this is; 0 serves HTTP"),
    Flag(
        "dist_init_addr",
        ("dist-init-addr", "nccl-init-addr"),
        address,
        "host:port of node 0 where the ranks meet; the next port must be free as well",
    ),
    Flag(
        "layer_group_count",
        ("layer-group-count",),
        integer(1, 1024),
        "layer groups of a page that leave one after another",
    ),
    Flag(
        "cpu_thread_count",
        ("cpu-threads",),
        integer(1, 1024),
        "threads of one worker on a CPU [half of the cores, shared by the ranks]",
    ),
    Flag(
        "disable_radix_cache",
        ("disable-radix-cache",),
        switch,
        "do not keep prefixes for later requests",
        is_switch=True,
    ),
    Flag(
        "transport",
        ("transport",),
        choice("auto", "shm", "tcp"),
        "what UCX may use: auto, shm or tcp",
    ),
    Flag(
        "hand_over",
        ("hand-over",),
        choice(*HandOver),
        "how caches travel: auto, direct (never staged), landing (staged; the pool stays private)",
    ),
    Flag(
        "verify_transfer",
        ("verify-transfer",),
        choice(*Verify),
        "compare caches with what was sent: off, sample or full; the stricter side decides",
    ),
    Flag(
        "landing_mb",
        ("landing-mb",),
        integer(1, 1 << 16),
        "MiB of a rank that staged transfers land in, on a decode server",
    ),
    Flag("ucx", ("ucx",), ucx_origin, "which UCX is loaded: auto, wheel, system or a directory"),
    Flag(
        "heartbeat_interval_s",
        ("heartbeat-interval",),
        number(0.05, 0.4),
        "seconds between two heartbeats to a peer",
    ),
    Flag(
        "peer_timeout_s",
        ("peer-timeout",),
        number(0.1, 600),
        "seconds of silence after which a peer is given up",
    ),
    Flag(
        "stall_timeout_s",
        ("stall-timeout",),
        number(0.1, 600),
        "seconds that a worker may be silent, or its engine stand still [2 on a CPU, 10 on a GPU]",
    ),
    Flag(
        "request_timeout_s",
        ("request-timeout",),
        number(0.1, 86400),
        "seconds that a request may take, and does unless its `timeout` says less",
    ),
    Flag(
        "max_body_nbytes",
        ("max-body-bytes",),
        integer(1024, 1 << 30),
        "largest HTTP request body, in bytes",
    ),
    Flag(
        "drain_timeout_s",
        ("drain-timeout",),
        number(0, 3600),
        "seconds that a stopping server waits for open requests",
    ),
    Flag(
        "api_keys",
        ("api-key",),
        api_keys,
        "keys that HTTP clients must show as `Authorization: Bearer KEY`; seen by every user of "
        "this machine, so better in a file or in BATON_API_KEY",
        is_secret=True,
    ),
    Flag("api_key_file", ("api-key-file",), text, "file of such keys, one per line"),
    Flag(
        "admin_api_keys",
        ("admin-api-key",),
        api_keys,
        "keys that abort_request and flush_cache ask for [--api-key]; or BATON_ADMIN_API_KEY",
        is_secret=True,
    ),
    Flag("curve_secret_key_file", ("curve-secret-key-file",), text, "file of this server's key"),
    Flag("curve_peer_keys_file", ("curve-peer-keys-file",), text, "file of its peers' public keys"),
    Flag("admin_api_key_file", ("admin-api-key-file",), text, "file of such keys, one per line"),
)


class _Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, no usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_settings(
    program: str, description: str, flags: Sequence[Flag], argv: Sequence[str], **defaults: Value
) -> Settings:
    """Settings by name from a command line and the file it names; `defaults` fill what neither has.

    Raises: ConfigError. Exits with 0 after --help.
    """
    parser = _Parser(
        prog=program,
        description=description,
        epilog="[ ] shows what an omitted flag follows.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win")
    builtin = {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}
    for flag in flags:
        _add(parser, flag, defaults.get(flag.name, builtin[flag.name]))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown("flag", "--", unknown[0], flags))
    settings = dict(defaults)
    if given.config is not None:
        settings |= read_settings(given.config, flags)
    for flag in flags:
        for value in vars(given)[flag.name] or ():
            settings[flag.name] = _parse(flag, f"--{flag.spellings[0]}", value)
    return settings


def read_settings(path: str, flags: Sequence[Flag]) -> Settings:
    """Settings from a YAML file whose keys are flags without the dashes. Raises: ConfigError."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--config {path}: can't be read: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        reason = " ".join(str(exc).split())
        raise ConfigError(f"--config {path}: is not a YAML file: {reason}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: must hold `flag: value` lines")
    by_spelling = {spelling: flag for flag in flags for spelling in flag.spellings}
    settings: Settings = {}
    for key, value in document.items():
        spelling = str(key).replace("_", "-")
        flag = by_spelling.get(spelling)
        if flag is None:
            raise ConfigError(f"--config {path}: {_unknown('key', '', spelling, flags)}")
        if flag.name in settings:
            raise ConfigError(f"--config {path}: {spelling} is given twice")
        settings[flag.name] = _parse(flag, f"--config {path}: {spelling}", _yaml_text(value))
    return settings


def to_config(settings: Settings) -> ServerConfig:
    """The checked record of `settings`, whose names and types the parsers already made right.

    Raises: ConfigError if a required setting is missing or settings don't go together.
    """
    for name, flag in (("model_path", "--model-path"), ("port", "--port")):
        if settings.get(name) is None:
            raise ConfigError(f"{flag} is required")
    given = Path(str(settings["model_path"]))
    model_path = str(given.expanduser().absolute())
    tokenizer_path = str(Path(str(settings.get("tokenizer_path") or model_path)).expanduser())
    complete = settings | {
        "model_path": model_path,
        "tokenizer_path": str(Path(tokenizer_path).absolute()),
        "served_model_name": settings.get("served_model_name") or Path(model_path).name,
    }
    config = with_api_keys(msgspec.convert(complete, ServerConfig))
    check_config(config)
    return config


def _add(parser: argparse.ArgumentParser, flag: Flag, default: object) -> None:
    """`nargs` is a list in either case, so that an omitted flag is told from one given empty."""
    names = [f"--{spelling}" for spelling in flag.spellings]
    is_shown = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    shown = f"{flag.help} (default: {default})" if is_shown else flag.help
    shown = shown.replace("%", "%%")
    if flag.is_switch:
        parser.add_argument(*names, dest=flag.name, action="append_const", const="true", help=shown)
    else:
        parser.add_argument(*names, dest=flag.name, action="append", metavar="X", help=shown)


def _parse(flag: Flag, where: str, value: str) -> Value:
    try:
        return flag.parse(value)
    except ValueError as exc:
        shown = value if value.isprintable() and " " not in value and value else repr(value)
        shown = "(not shown)" if flag.is_secret else shown
        raise ConfigError(f"{where} {shown}: {exc}") from exc


def _yaml_text(value: object) -> str:
    """A YAML value as one would write it behind a flag; what fits no flag is shown as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return str(value)


def _unknown(kind: str, prefix: str, given: str, flags: Sequence[Flag]) -> str:
    spellings = [f"{prefix}{spelling}" for flag in flags for spelling in flag.spellings]
    near = difflib.get_close_matches(given.split("=")[0], spellings, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all of them"
    return f"unknown {kind} {given!r}{hint}"
