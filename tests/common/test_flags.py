"""Settings from flags and files: every bad one stops the start with a line that names it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from common.config import EngineType, LocalPrefill, Role, ServerConfig, read_config, write_config
from common.errors import ConfigError
from common.flags.flag import Flag
from common.flags.table import ALL_FLAGS, GROUPS, flags_of
from common.flags.values import switch
from decode_server.config import parse_args as parse_decode
from prefill_server.config import parse_args as parse_prefill

PREFILL_FLAGS, DECODE_FLAGS = flags_of(Role.PREFILL), flags_of(Role.DECODE)
COMMON_FLAGS = [flag for flag in ALL_FLAGS if flag.role is None]
Parse = Callable[[Sequence[str]], ServerConfig]
NGRAM = ("--speculative-algorithm", "NGRAM")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def decode(model: Path, *argv: str) -> ServerConfig:
    return parse_decode(["--model-path", str(model), "--prefill", "none", *argv])


def prefill(model: Path, *argv: str) -> ServerConfig:
    return parse_prefill(["--model-path", str(model), *argv])


def test_the_issue_s_two_command_lines(model: Path) -> None:
    first = parse_prefill(
        f"--model-path {model} --host 127.0.0.1 --port 30000 --bootstrap-port 8998".split()
    )
    assert (first.role, first.port, first.bootstrap_port) == (Role.PREFILL, 30000, 8998)
    assert first.engine_type is EngineType.PREFILL
    second = parse_decode(f"--model-path {model} --port 30001 --prefill 127.0.0.1:8998".split())
    assert (second.role, second.prefill) == (Role.DECODE, ("127.0.0.1:8998",))
    assert second.engine_type is EngineType.DECODE


def test_omitted_flags_follow_what_help_says(model: Path) -> None:
    config = decode(model)
    assert config.page_size == 16 and config.max_total_tokens is None
    assert config.tokenizer_path == config.model_path == str(model)
    assert config.served_model_name == "tiny-model"
    assert (config.host, config.request_timeout_s) == ("127.0.0.1", 600.0)
    assert config.engine_type is EngineType.UNIFIED
    assert prefill(model).bootstrap_port == 8998


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "one", "org/two"],
        ["--served-model-name", "one,org/two"],
        ["--served-model-name=one, org/two", "--port", "1"],
        ["--served-model-name", "other", "--served-model-name", "one", "org/two"],
    ],
)
def test_a_model_may_have_several_names_of_which_the_first_is_its_own(
    model: Path, argv: list[str]
) -> None:
    config = decode(model, *argv)
    assert (config.served_model_name, config.model_aliases) == ("one", ("org/two",))


def test_every_field_but_the_derived_ones_has_a_flag() -> None:
    derived = {"role", "runtime_dir", "remarks", "model_aliases"}
    names = {flag.name for flag in (*DECODE_FLAGS, *PREFILL_FLAGS)}
    assert names == set(ServerConfig.__struct_fields__) - derived


def test_no_two_flags_share_a_spelling_or_a_name() -> None:
    for flags in (DECODE_FLAGS, PREFILL_FLAGS):
        spellings = [spelling for flag in flags for spelling in flag.spellings]
        assert len(set(spellings)) == len(spellings)
        assert len({flag.name for flag in flags}) == len(flags)


VALID = [
    (("--page-size", "1"), "page_size", 1),
    (("--page-size", "256"), "page_size", 256),
    (("--chunked-prefill-size", "512"), "chunked_prefill_size", 512),
    ((), "device", "auto"),
    (("--device", "cuda"), "device", "cuda"),
    (("--base-gpu-id", "4"), "base_gpu_id", 4),
    (("--dtype", "bfloat16"), "dtype", "bfloat16"),
    (("--kv-cache-dtype", "float16"), "kv_cache_dtype", "float16"),
    (("--kv-cache-dtype", "fp8_e4m3"), "kv_cache_dtype", "float8_e4m3fn"),
    (("--kv-cache-dtype", "float8_e4m3fn"), "kv_cache_dtype", "float8_e4m3fn"),
    (("--attention-backend", "flashinfer"), "attention_backend", "flashinfer"),
    (("--transfer-mode", "staged"), "transfer_mode", "staged"),
    (("--staging-buffer-mb", "8"), "staging_buffer_mb", 8),
    (("--verify-transfer", "sample"), "verify_transfer", "sample"),
    (("--mem-fraction-static", "0.5"), "mem_fraction_static", 0.5),
    (("--max-total-tokens", "16"), "max_total_tokens", 16),
    ((), "host_cache_gb", 0.0),
    (("--host-cache-gb", "0.5"), "host_cache_gb", 0.5),
    (("--host-cache-gb", "0", "--disable-radix-cache"), "host_cache_gb", 0.0),
    (("--load-format", "dummy"), "load_format", "dummy"),
    ((), "quantized_weights", "auto"),
    (("--quantized-weights", "narrow"), "quantized_weights", "narrow"),
    (("--tp", "2"), "tp_size", 2),
    (("--tensor-parallel-size=4",), "tp_size", 4),
    (("--random-seed", str(2**63 - 1)), "random_seed", 2**63 - 1),
    (("--disable-radix-cache",), "disable_radix_cache", True),
    ((), "max_checkpoints", None),
    (("--max-checkpoints", "0"), "max_checkpoints", 0),
    (("--max-checkpoints", "0", "--disable-radix-cache"), "max_checkpoints", 0),
    (("--max-checkpoints", "65536"), "max_checkpoints", 65536),
    (("--disable-cuda-graph",), "disable_cuda_graph", True),
    (("--cuda-graph-max-bs", "64"), "cuda_graph_max_bs", 64),
    ((), "disable_overlap_schedule", False),
    (("--disable-overlap-schedule",), "disable_overlap_schedule", True),
    (("--pp-size", "2"), "disable_overlap_schedule", True),
    ((), "schedule_low_priority_values_first", False),
    ((), "proposal_max", 0),
    (("--speculative-algorithm", "NGRAM"), "proposal_max", 4),
    ((*NGRAM, "--speculative-num-steps", "1"), "proposal_max", 1),
    ((*NGRAM, "--speculative-num-draft-tokens", "8"), "proposal_max", 7),
    (
        (*NGRAM, "--speculative-num-draft-tokens", "6", "--speculative-num-steps", "5"),
        "proposal_max",
        5,
    ),
    ((*NGRAM, "--speculative-eagle-topk", "1"), "speculative_eagle_topk", 1),
    ((*NGRAM, "--speculative-draft-p-min", "0.75"), "speculative_draft_p_min", 0.75),
    (
        ("--schedule-low-priority-values-first",),
        "schedule_low_priority_values_first",
        True,
    ),
    (("--transport", "stream"), "transport", "stream"),
    (("--transfer-ports", "40000-40031"), "transfer_ports", "40000-40031"),
    (("--net-devices", "lo"), "net_devices", "lo"),
    (("--ucx", "/"), "ucx", "/"),
    (("--metrics-names", "vllm"), "metrics_names", "vllm"),
    (("--otlp-traces-endpoint", "c:4318"), "otlp_traces_endpoint", "http://c:4318/v1/traces"),
    (("--otlp-traces-endpoint", "https://c/x/"), "otlp_traces_endpoint", "https://c/x"),
    (("--request-timeout", "1.5"), "request_timeout_s", 1.5),
    (("--drain-timeout", "0"), "drain_timeout_s", 0.0),
    (("--peer-timeout", "0.4"), "peer_timeout_s", 0.4),
    (("--worker-timeout", "0.4"), "worker_timeout_s", 0.4),
    (("--stall-timeout", "30"), "stall_timeout_s", 30.0),
    (("--max-body-bytes", "1024"), "max_body_nbytes", 1024),
    (("--port", "1", "--port", "65535"), "port", 65535),
    (("--host", "::1"), "host", "::1"),
    ((), "local_prefill", LocalPrefill.AUTO),
    (("--local-prefill", "off"), "local_prefill", LocalPrefill.OFF),
    (("--local-prefill", "fallback"), "local_prefill", LocalPrefill.FALLBACK),
    (("--prefill", "a:1,b:2"), "prefill", ("a:1", "b:2")),
    (("--prefill", "[::1]:8998, b:2"), "prefill", ("[::1]:8998", "b:2")),
]


@pytest.mark.parametrize(("argv", "field", "value"), VALID)
def test_a_good_value_is_taken(
    model: Path, argv: tuple[str, ...], field: str, value: object
) -> None:
    config = decode(model, *argv)
    assert {name: getattr(config, name) for name in (field,)} == {field: value}


BAD = [
    ("--local-prefill", "always", "must be one of off, auto, fallback"),
    ("--page-size", "48", "power of two in 1..256"),
    ("--page-size", "0", "power of two in 1..256"),
    ("--page-size", "512", "power of two in 1..256"),
    ("--page-size", "-16", "power of two in 1..256"),
    ("--page-size", "16.0", "power of two in 1..256"),
    ("--port", "0", "1..65535"),
    ("--port", "65536", "1..65535"),
    ("--port", "http", "1..65535"),
    ("--port", "1_000", "1..65535"),
    ("--host", "http://x", "without scheme"),
    ("--host", "a b", "without scheme"),
    ("--device", "tpu", "auto, cpu, cuda"),
    ("--dtype", "fp32", "auto, float32, bfloat16, float16"),
    ("--kv-cache-dtype", "fp8_e5m2", "auto, float32, bfloat16, float16, fp8_e4m3"),
    ("--attention-backend", "fa3", "must be one of auto, sdpa, flashinfer"),
    ("--transfer-mode", "landing", "must be one of auto, direct, staged"),
    ("--staging-buffer-mb", "0", "must be an integer in 1..65536"),
    ("--verify-transfer", "on", "must be one of off, sample, full"),
    ("--chunked-prefill-size", "0", "1..1048576"),
    ("--chunked-prefill-size", "-1", "1..1048576"),
    ("--max-running-requests", "0", "1..4096"),
    ("--max-queued-requests", "99999999", "1..65536"),
    ("--max-total-tokens", "0", "1.."),
    ("--mem-fraction-static", "1", "0.01..0.99"),
    ("--mem-fraction-static", "nan", "0.01..0.99"),
    ("--host-cache-gb", "-1", "must be a number in 0..65536"),
    ("--host-cache-gb", "nan", "must be a number in 0..65536"),
    ("--context-length", "none", "1..16777216"),
    ("--load-format", "pt", "auto, dummy"),
    ("--quantized-weights", "int4", "auto, narrow, wide"),
    ("--log-level", "loud", "debug, info, warning, error"),
    ("--random-seed", str(2**63), "0..9223372036854775807"),
    ("--tp-size", "0", "1..1024"),
    ("--layer-group-count", "9999", "1..1024"),
    ("--speculative-algorithm", "EAGLE", "must be one of NGRAM, NEXTN, EAGLE3"),
    ("--speculative-num-steps", "33", "must be an integer in 1..32"),
    ("--speculative-num-draft-tokens", "1", "must be an integer in 2..33"),
    ("--speculative-eagle-topk", "4", "must be an integer in 1..1"),
    ("--speculative-draft-p-min", "1.5", "must be a number in 0..1"),
    ("--transport", "tcp", "auto, shm, stream, ucx-tcp"),
    ("--transfer-ports", "40031-40000", "FIRST-LAST"),
    ("--net-devices", "lo,nosuch0", "must be all, or some of"),
    ("--ucx", "/nowhere/at/all", "existing directory"),
    ("--request-timeout", "0", "0.1..86400"),
    ("--request-timeout", "inf", "0.1..86400"),
    ("--drain-timeout", "-1", "0..3600"),
    ("--max-body-bytes", "10", "1024.."),
    ("--metrics-names", "both,", "sglang, vllm, both"),
    ("--request-history", "-1", "0..65536"),
    ("--otlp-traces-endpoint", "grpc://c:4317", "http:// or https:// URL"),
    ("--otlp-traces-endpoint", "c:port", "http:// or https:// URL"),
    ("--otlp-traces-endpoint", "c:99999", "http:// or https:// URL"),
    ("--otlp-traces-endpoint", "http://", "http:// or https:// URL"),
    ("--served-model-name", "", "printable"),
    ("--served-model-name", "a,,b", "printable"),
    ("--served-model-name", "a\nb", "printable"),
    ("--prefill", "", "host:port"),
    ("--prefill", "8998", "host:port"),
    ("--prefill", "a:0", "host:port"),
    ("--prefill", "a:99999", "host:port"),
    ("--prefill", "a:1,,b:2", "host:port"),
    ("--prefill", "a:1,none", "host:port"),
    ("--prefill", "::1:8998", "host:port"),
    ("--prefill", "a:1,a:1", "once"),
    ("--prefill", "tcp://a:1", "host:port"),
]


@pytest.mark.parametrize(("flag", "value", "allowed"), BAD)
def test_a_bad_value_is_named_with_what_is_allowed(
    model: Path, flag: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(model, f"{flag}={value}")
    line = str(caught.value)
    assert line.startswith(flag) and allowed in line and "\n" not in line
    assert value in line or repr(value) in line


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--page-sizes", "16"], "unknown flag '--page-sizes'; did you mean --page-size?"),
        (["--hand-over", "auto"], "unknown flag '--hand-over': it is called --transfer-mode now"),
        (["--landing-mb=64"], "'--landing-mb': it is called --staging-buffer-mb now"),
        (["--page"], "unknown flag '--page'; did you mean --page-size?"),
        (["stray"], "unknown flag 'stray'; --help lists all of them"),
        (["--port"], "argument --port: expected one argument"),
        (["--disable-radix-cache=yes"], "ignored explicit argument 'yes'"),
    ],
)
def test_an_unknown_or_incomplete_flag_is_named(model: Path, argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(model, *argv)
    assert line in str(caught.value)


def test_each_role_refuses_the_other_s_flag(model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown flag '--bootstrap-port'"):
        decode(model, "--bootstrap-port", "1")
    with pytest.raises(ConfigError, match="unknown flag '--prefill': it is the decode server's"):
        prefill(model, "--prefill", "a:1")


def test_required_flags_are_named(model: Path) -> None:
    with pytest.raises(ConfigError, match="--model-path is required"):
        parse_prefill([])
    with pytest.raises(ConfigError, match=r"--prefill is required: host:port, .* or `none`"):
        parse_decode(["--model-path", str(model)])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--chunked-prefill-size", "100"], "--chunked-prefill-size 100: must be a multiple of"),
        (["--max-total-tokens", "15"], "--max-total-tokens 15: must be at least one page"),
        (
            ["--max-checkpoints", "5", "--disable-radix-cache"],
            "--max-checkpoints 5: must be 0 with --disable-radix-cache",
        ),
        (
            ["--host-cache-gb", "0.5", "--disable-radix-cache"],
            "--host-cache-gb 0.5: must be 0 with --disable-radix-cache",
        ),
        (["--max-checkpoints", "-1"], "--max-checkpoints -1: must be an integer in 0..65536"),
        (["--port", "8998"], "--bootstrap-port 8998: must differ from --port 8998"),
        (
            ["--device", "cuda", "--transport", "stream"],
            "stream: must be auto or ucx-tcp",
        ),
        (["--transport", "shm", "--device", "cuda"], "shm: must be auto or ucx-tcp"),
        (
            [*NGRAM, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "3"],
            "--speculative-num-draft-tokens 3: must be 4, one more than",
        ),
        ([*NGRAM, "--pp-size", "2"], "NGRAM: must not be given with --pp-size 2"),
        (["--speculative-algorithm", "EAGLE3"], "--speculative-draft-model-path (none): must be a"),
        (
            ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", "/head"],
            "--speculative-draft-model-path /head: must not be given with",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    model: Path, argv: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prefill(model, *argv)
    assert line in str(caught.value)


def test_heartbeats_may_be_as_rare_as_the_timeouts_allow(model: Path) -> None:
    slow = ["--heartbeat-interval", "5", "--peer-timeout", "20", "--worker-timeout", "10"]
    assert decode(model, *slow).heartbeat_interval_s == 5.0
    with pytest.raises(ConfigError, match="--peer-timeout 9: must be at least two heartbeats"):
        decode(model, *slow, "--peer-timeout", "9")


def test_an_engine_may_stand_still_as_long_as_fits_its_device(model: Path) -> None:
    assert [decode(model).stall_s(device) for device in ("cpu", "cuda")] == [2.0, 10.0]
    assert decode(model, "--stall-timeout", "3").stall_s("cuda") == 3.0


def test_a_checkpoint_that_can_not_be_used_is_named(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=rf"--model-path {missing}: .* config\.json"):
        prefill(missing)
    with pytest.raises(ConfigError, match=r"--model-path .*config\.json"):
        prefill(model / "config.json")
    with pytest.raises(ConfigError, match=r"--tokenizer-path .*tokenizer\.json"):
        prefill(model, "--tokenizer-path", str(tmp_path))
    (model / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        prefill(model)
    for content in (b"{", b'{"model_type": "\xff"}'):
        (model / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
            prefill(model)


def test_a_relative_model_path_becomes_absolute(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert parse_prefill(["--model-path", "tiny-model"]).model_path == str(model)


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_may_hold_every_flag_and_flags_win(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model-path: {model}\nport: 31000\npage_size: 32\ndisable-radix-cache: true\n"
        "prefill: [127.0.0.1:8998, '[::1]:8999']\nmem-fraction-static: 0.5\n"
    )
    config = parse_decode(["--config", str(file), "--port", "32000"])
    assert config.model_path == str(model)
    assert (config.port, config.page_size, config.mem_fraction_static) == (32000, 32, 0.5)
    assert config.disable_radix_cache
    assert config.prefill == ("127.0.0.1:8998", "[::1]:8999")


def test_a_file_takes_any_flag_under_any_of_its_spellings(model: Path, tmp_path: Path) -> None:
    keys, template = tmp_path / "keys", tmp_path / "chat.jinja"
    keys.touch(mode=0o600)
    keys.write_text("sk-1")
    template.write_text("{{ messages }}")
    directories = ("model_path", "tokenizer_path")
    values: dict[str, object] = dict.fromkeys(directories, str(model))
    values |= dict.fromkeys(("api_key_file", "admin_api_key_file"), str(keys))
    values |= {"chat_template": str(template), "served_model_name": "x", "host": "::1"}
    values |= {
        "page_size": "16",
        "mem_fraction_static": "0.5",
        "tool_call_parser": "hermes",
        "reasoning_parser": "auto",
    }
    values |= {"speculative_algorithm": "NGRAM", "speculative_num_steps": "5"}
    values |= {"speculative_num_draft_tokens": "6", "speculative_eagle_topk": "1"}
    values |= {"speculative_draft_p_min": "0.5"}
    values |= {"net_devices": "all", "ucx": "auto", "transfer_ports": "40000-40031"}
    values |= {"nnodes": "1", "node_rank": "0", "dist_init_addr": "10.0.0.1:5000"}
    values |= {"heartbeat_interval_s": "0.2", "max_body_nbytes": "4096"}
    values |= {"allowed_hosts": "chat.example", "allowed_origins": "https://chat.example"}
    pair = {"curve-secret-key-file", "curve-peer-keys-file"}
    for flag in COMMON_FLAGS:
        default = "true" if flag.is_switch else _first_choice(flag) or "64"
        for spelling in flag.spellings:
            file = tmp_path / "one.yaml"
            file.write_text(json.dumps({spelling: values.get(flag.name, default)}))
            argv = ["--model-path", str(model), "--config", str(file)]
            argv += [f"--{other}=x" for other in pair - {spelling} if spelling in pair]
            parse_prefill(argv[2:] if flag.name == "model_path" else argv)


def _choices(flag: Flag) -> list[str]:
    return flag.placeholder.strip("{}").split(",") if flag.placeholder.startswith("{") else []


def _first_choice(flag: Flag) -> str:
    return next(iter(_choices(flag)), "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hand_over: auto", "unknown key 'hand-over': it is called transfer-mode now"),
        ("page-sizes: 16", "unknown key 'page-sizes'; did you mean page-size?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("page-size: 48", "page-size 48: must be a power of two"),
        ("page-size: 16\npage_size: 32", "page-size is given twice"),
        ("page-size: 16\npage-size: 16", "the key 'page-size' is given twice"),
        ("disable-radix-cache: 1", "disable-radix-cache 1: must be true or false"),
        ("port: null", "port None: must be an integer"),
        ("port: [1, 2]", "port '[1, 2]': must be an integer"),
        ("port: true", "port true: must be an integer"),
        ("prefill: {a: 1}", "must be host:port"),
        ("- port", "must hold `flag: value` lines"),
        ("port: [", "is not a YAML file"),
        ("port: !!python/object/apply:os.getpid []", "is not a YAML file"),
    ],
)
def test_a_bad_file_stops_the_start_and_is_named(
    model: Path, tmp_path: Path, text: str, line: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        decode(model, "--config", str(file))
    assert str(caught.value).startswith(f"--config {file}") and line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        decode(model, "--config", str(tmp_path / "none.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a YAML file"):
        decode(model, "--config", str(binary))


def test_an_empty_file_changes_nothing(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert decode(model, "--config", str(tmp_path / "empty.yaml")) == decode(model)


# ---- the record between processes ----------------------------------------------------------------


def test_the_record_survives_the_way_through_its_file(model: Path, tmp_path: Path) -> None:
    config = decode(model, "--prefill", "a:1,b:2", "--max-total-tokens", "4096")
    config = ServerConfig(
        **{name: getattr(config, name) for name in ServerConfig.__struct_fields__}
        | {"runtime_dir": str(tmp_path)}
    )
    write_config(config)
    assert read_config(config.config_path) == config
    assert Path(config.config_path).stat().st_mode & 0o777 == 0o600
    assert config.scheduler_ipc == f"ipc://{tmp_path}/scheduler.sock"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"role": "judge"}', b'{"port": 1}', b"\xff", b'{"role": "\xff"}']
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="not a server's settings"):
        read_config(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="can't be read"):
        read_config(str(tmp_path / "other.json"))


# ---- the command line as a user sees it ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prefill_server", "decode_server"])
def test_a_bad_start_is_one_line_and_exit_code_2(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--page-size", "48"],
        capture_output=True,
        text=True,
        check=False,
    )
    role = module.removesuffix("_server")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"baton-{role}: --page-size 48: must be a power of two in 1..256\n"


def test_every_flag_stands_in_one_group_of_the_help() -> None:
    shown = [flag.name for group in GROUPS for flag in group.flags]
    assert sorted(shown) == sorted({flag.name for flag in (*PREFILL_FLAGS, *DECODE_FLAGS)})
    for flag in ALL_FLAGS:
        assert flag.is_switch == (flag.parse is switch), flag.name


def test_a_placeholder_lists_what_may_be_chosen() -> None:
    chosen = [flag for flag in ALL_FLAGS if _choices(flag)]
    assert len(chosen) >= 12
    for flag in chosen:
        for value in _choices(flag):
            flag.parse(value)
        with pytest.raises(ValueError, match="must be one of") as caught:
            flag.parse("nonsense")
        allowed = str(caught.value).removeprefix("must be one of ").split(", ")
        assert set(_choices(flag)) <= set(allowed) <= {*_choices(flag), "float8_e4m3fn"}


def test_every_flag_that_takes_a_value_says_what_it_is_by_default() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}
    for flag in ALL_FLAGS:
        has_default = defaults[flag.name] not in (None, "", (), msgspec.NODEFAULT)
        is_shown = has_default or flag.name == "port"  # each role has its own
        says = re.search(r"\[.+\]|\(required\)", flag.help) is not None
        assert flag.is_switch or is_shown != says, flag.name


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prefill_server", "decode_server"])
def test_help_names_every_flag_with_its_default_and_exits_0(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for flag in PREFILL_FLAGS if module == "prefill_server" else DECODE_FLAGS:
        assert all(f"--{spelling}" in text for spelling in flag.spellings)
    shown = "--page-size TOKENS, --block-size TOKENS tokens per page, a power of two in 1..256"
    assert f"{shown} (default: 16)" in text
    assert "--device {auto,cpu,cuda} where the model runs" in text
    assert "may take, and does unless its `timeout` says less (default: 600)" in text
    assert "tensor parallel ranks (default: 1)" in text
    assert "(default: )" not in text and "(default: False)" not in text
