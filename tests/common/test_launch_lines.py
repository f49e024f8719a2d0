"""The commands that start SGLang and vLLM start our servers, or end with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config import Role, ServerConfig
from common.errors import ConfigError
from common.flags.foreign import HARMLESS, REFUSED, ROLES, ForeignFlags, Takes, foreign_flags_of
from common.flags.table import ALL_FLAGS, flags_of
from tests.common.launch_lines import LINES, REFUSED_LINES, Line, RefusedLine
from tests.deploy.commands import PARSERS

ROWS = (*ROLES, *HARMLESS, *REFUSED)
# Of a checkpoint, and of each role.
DERIVED = {"role", "model_path", "tokenizer_path", "served_model_name", "remarks"}
PORTS = {Role.PREFILL: 30000, Role.DECODE: 30001}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def parse(role: Role, words: Sequence[str], model: Path) -> ServerConfig:
    return PARSERS[role]([str(model) if word == "DIR" else word for word in words])


def settings_of(config: ServerConfig) -> dict[str, object]:
    """Those that are not their defaults."""
    defaults = dict(zip(config.__struct_fields__[5:], config.__struct_defaults__, strict=True))
    found = {
        name: value
        for name in config.__struct_fields__
        if name not in DERIVED and (value := getattr(config, name)) != defaults.get(name, ...)
    }
    if found["port"] == PORTS[config.role]:
        del found["port"]
    return found


def named(line: Line | RefusedLine) -> str:
    return f"{line.role} by {line.source}"


@pytest.mark.parametrize("line", LINES, ids=named)
def test_a_documented_line_means_here_what_it_means_there(line: Line, model: Path) -> None:
    config = parse(line.role, line.words, model)
    assert (config.role, config.model_path) == (line.role, str(model))
    assert settings_of(config) == line.settings
    assert len(config.remarks) == len(line.remarks)
    for remark, begin in zip(config.remarks, line.remarks, strict=True):
        assert remark.startswith(begin) and " changes nothing here: " in remark
        assert "\n" not in remark


@pytest.mark.parametrize("line", REFUSED_LINES, ids=named)
def test_what_can_not_be_followed_is_named_at_once_with_what_to_write(
    line: RefusedLine, model: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line.role, line.words, model)
    message = str(caught.value)
    assert "\n" not in message and "changes nothing" not in message
    parts = re.split(r"; (?=--)", message)
    assert len(parts) == len(line.refused)
    for part, (flag, instead) in zip(parts, line.refused, strict=True):
        assert part.startswith(flag) and instead in part.removeprefix(flag)
    if line.cured:
        words = line.words
        for flag, _ in line.refused:
            at = words.index(flag.split()[0])
            del words[at : at + len(flag.split())]
        assert settings_of(parse(line.role, words, model)) == line.cured


def test_a_file_of_the_other_server_is_read_as_its_line_is(model: Path, tmp_path: Path) -> None:
    """The example in SGLang's documentation."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model-path: {model}\nhost: 0.0.0.0\nport: 30000\ntensor-parallel-size: 2\n"
        "enable-metrics: true\nlog-requests: true\n"
    )
    config = PARSERS[Role.PREFILL](["--config", str(file)])
    assert settings_of(config) == {"host": "0.0.0.0", "tp_size": 2, "log_requests": True}
    (remark,) = config.remarks
    assert remark.startswith(f"--config {file}: enable-metrics changes nothing here: /metrics")
    file.write_text(f"model-path: {model}\nenable_lora: true\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: enable-lora: no adapters are served"):
        PARSERS[Role.PREFILL](["--config", str(file)])
    file.write_text(f"model-path: {model}\nenable-lora: false\nenable-dp-attention: false\n")
    assert len(PARSERS[Role.PREFILL](["--config", str(file)]).remarks) == 2


def test_a_decode_line_without_prefill_servers_says_how_to_name_them(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prefill is required: host:port, .*\(8998 unless"):
        parse(Role.DECODE, ["--model-path", "DIR", "--disaggregation-mode", "decode"], model)


def test_a_name_instead_of_a_checkpoint_is_answered_with_how_to_fetch_it(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a local directory .* `hf download NAME"):
        parse(Role.PREFILL, ["--model-path", "meta-models/Some-8B-Instruct"], model)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["DIR", "--dtype", "int4"], "--dtype int4: must be one of auto, float32"),
        (["DIR", "--max-model-len", "7.5"], "--max-model-len 7.5: must be an integer in"),
        (["DIR", "--max_model_len=1.0001k"], "1.0001k: must be a whole number of tokens"),
        (["DIR", "-tp", "0"], "--tp 0: must be an integer in 1..1024"),
        (["DIR", "stray"], "unknown flag 'stray'"),
        (["DIR", "--page-sise", "16"], "unknown flag '--page-sise'; did you mean --page-size?"),
        (["DIR", "--hf-token=hf_secret"], "unknown flag '--hf-token'"),
        (["DIR", "--model-path", "DIR"], "unknown flag '/"),
        (["DIR", "--kv-transfer-config"], "--kv-transfer-config: expected one argument"),
        (["DIR", "--cuda-graph-bs", "--tp", "1"], "--cuda-graph-bs: expected one argument"),
        (["DIR", "--block-size", "16", "--max-num-batched-tokens", "100"], "a multiple of"),
        (["DIR", "--chat-template", "chatml"], "must be a file that holds a Jinja template"),
        (["DIR", "--chat-template", "DIR/config.json"], "must be a file that holds a Jinja"),
    ],
)
def test_an_error_names_the_spelling_that_was_given(
    words: list[str], line: str, model: Path
) -> None:
    words = [word.replace("DIR", str(model)) for word in words]
    with pytest.raises(ConfigError) as caught:
        parse(Role.PREFILL, words, model)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_a_template_s_file_is_found_from_where_the_server_is_started(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "mine.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(model)
    config = parse(Role.PREFILL, ["DIR", "--chat-template", "mine.jinja"], model)
    assert config.chat_template == str(model / "mine.jinja")


# ---- the tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_no_flag_of_another_server_is_one_of_ours_or_answered_twice(role: Role) -> None:
    ours = {spelling for flag in ALL_FLAGS for spelling in flag.spellings}
    assert not ours.intersection(foreign_flags_of(role))
    rows = [row for row in ROWS if row.role in (None, role)]
    written = [name for row in rows for name in f"{row.switches} {row.valued} {row.listed}".split()]
    assert sorted(written) == sorted(foreign_flags_of(role))
    assert len(flags_of(role)) < len(ours)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.answer)
def test_an_answer_is_one_line_and_some_value_is_answered_otherwise(row: ForeignFlags) -> None:
    assert row.answer and "\n" not in row.answer and not row.answer.endswith(".")
    assert row.names
    if row in HARMLESS:
        assert row.is_harmless("anything at all\n") and row.is_harmless("true")
    else:
        assert not row.is_harmless("true") or "kv-transfer-config" in row.names


def test_flags_take_what_follows_them(model: Path) -> None:
    takes = foreign_flags_of(Role.PREFILL)
    assert takes["cuda-graph-bs"].takes is Takes.VALUES
    text = "DIR --cuda-graph-bs 1 2 4 --trust-remote-code --schedule-policy lpm --port 7"
    config = parse(Role.PREFILL, text.split(), model)
    assert config.port == 7
    assert [remark.partition(" changes")[0] for remark in config.remarks] == [
        "--cuda-graph-bs '1 2 4'", "--trust-remote-code", "--schedule-policy lpm",
    ]  # fmt: skip


def test_flags_of_both_roles_are_taken_where_a_server_may_change_its_own(model: Path) -> None:
    words = "--model-path DIR --enable-pd-role-switch --disaggregation-mode prefill --prefill a:1"
    config = parse(Role.PREFILL, words.split(), model)
    assert config.enable_role_switch and config.prefill == ("a:1",)
