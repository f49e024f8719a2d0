"""What can't work stops the start: one line that names the value and what is allowed.

Exit code 2 where it never will, 75 where a later start may find it otherwise.

A setting is refused by the parent process at once; what needs the checkpoint's content or a socket
is refused by the process that finds it, and ends the whole server.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.exit_codes import EXIT_CONFIG, EXIT_START_AGAIN
from demo.servers import free_ports
from tests.e2e.fleet import CHECKPOINT, WAIT_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def start(role: str, *args: str, model: Path = CHECKPOINT) -> tuple[int, str, str]:
    """Start a server that is expected to end; (exit code, stdout, stderr)."""
    http_port, bootstrap_port = free_ports(2)
    command = [sys.executable, "-m", f"{role}_server", "--model-path", str(model)]
    if "--port" not in args:
        command += ["--port", str(http_port)]
    if role == "prefill" and "--bootstrap-port" not in args:
        command += ["--bootstrap-port", str(bootstrap_port)]
    if role == "decode" and "--prefill" not in args:
        command += ["--prefill", "none"]
    command += ["--max-total-tokens", "1024", "--cpu-threads", "1", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def check_refused(found: tuple[int, str, str], *words: str, exit_code: int = EXIT_CONFIG) -> None:
    """An exit code, and on stderr one line with all of `words`, besides what was no complaint."""
    code, stdout, stderr = found
    assert code == exit_code, stderr
    assert stdout == ""
    lines = [line for line in stderr.splitlines() if " info [" not in line]
    assert len(lines) == 1, stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("role", "args", "words"),
    [
        ("prefill", ("--page-size", "48"), ("--page-size 48", "power of two in 1..256")),
        ("decode", ("--page-size", "0"), ("--page-size 0", "power of two in 1..256")),
        ("prefill", ("--dtype", "int4"), ("--dtype int4", "bfloat16")),
        ("decode", ("--port", "70000"), ("--port 70000", "65535")),
        (
            "prefill",
            ("--chunked-prefill-sise", "32"),
            ("--chunked-prefill-sise", "--chunked-prefill-size"),
        ),
        ("decode", ("--tokenizer-path", "/nowhere"), ("/nowhere", "tokenizer.json")),
        ("prefill", ("--config", "/nowhere.yaml"), ("/nowhere.yaml", "No such file")),
    ],
)
def test_a_bad_setting_is_one_line(role: str, args: tuple[str, ...], words: tuple[str]) -> None:
    check_refused(start(role, *args), *words)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_missing_checkpoint_is_one_line(role: str) -> None:
    check_refused(start(role, model=Path("/nowhere/model")), "/nowhere/model", "config.json")


@pytest.mark.parametrize("value", ["somewhere", "host:0", "a:1,a:1", ""])
def test_a_bad_prefill_address_is_one_line(value: str) -> None:
    check_refused(start("decode", "--prefill", value), "--prefill", value)


def test_a_decode_server_must_be_told_of_its_prefill_servers() -> None:
    command = [sys.executable, "-m", "decode_server", "--model-path", str(CHECKPOINT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_TIMEOUT_S)
    check_refused((done.returncode, done.stdout, done.stderr), "--prefill is required", "none")


def test_an_unknown_key_of_a_settings_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("page-size: 16\npage-sise: 32\n")
    check_refused(start("prefill", "--config", str(path)), str(path), "page-sise", "page-size")


# ---- found out by one of the server's processes --------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


def test_a_taken_http_port_is_one_line(taken_port: int) -> None:
    found = start("decode", "--port", str(taken_port))
    check_refused(found, str(taken_port), "in use", exit_code=EXIT_START_AGAIN)


def test_a_taken_bootstrap_port_is_one_line(taken_port: int) -> None:
    found = start("prefill", "--bootstrap-port", str(taken_port))
    check_refused(found, str(taken_port), "in use", exit_code=EXIT_START_AGAIN)


def test_a_host_whose_name_does_not_resolve_yet_asks_for_another_start() -> None:
    found = start("prefill", "--host", "no-such-host.invalid")
    assert found[0] == EXIT_START_AGAIN and "no-such-host.invalid" in found[2]


def test_a_pool_that_does_not_fit_now_asks_for_another_start() -> None:
    found = start("decode", "--max-total-tokens", str(1 << 40))
    check_refused(found, "--max-total-tokens", "are free", exit_code=EXIT_START_AGAIN)


def copy_checkpoint(directory: Path, **changes: object) -> Path:
    """The demo checkpoint with members of its config.json changed."""
    shutil.copytree(CHECKPOINT, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_an_unsupported_architecture_is_one_line(tmp_path: Path) -> None:
    model = copy_checkpoint(tmp_path / "model", architectures=["BertForMaskedLM"])
    check_refused(start("decode", model=model), "BertForMaskedLM", "Qwen3ForCausalLM")


def test_a_checkpoint_without_its_weights_is_one_line(tmp_path: Path) -> None:
    model = copy_checkpoint(tmp_path / "model")
    (model / "model.safetensors").unlink()
    check_refused(start("prefill", model=model), str(model), "safetensors")


def test_more_layer_groups_than_layers_are_one_line() -> None:
    check_refused(start("prefill", "--layer-group-count", "100"), "--layer-group-count 100", "1..")


def test_a_context_longer_than_the_models_is_one_line() -> None:
    check_refused(start("decode", "--context-length", "9999"), "--context-length 9999", "1..2048")
