"""Reads settings: a command line, and a YAML file that may hold all of them.

Flags and file go through the same parsers, and flags win. Every error is a `ConfigError` of one
line that names the flag, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import yaml

from common.config import ServerConfig
from common.config_checks import check_config
from common.config_keys import with_api_keys
from common.errors import ConfigError
from common.flags.flag import Flag
from common.flags.foreign_reading import ForeignFlagsByName, answer, plain, take_foreign
from common.flags.table import GROUPS
from common.flags.values import Value

Settings = dict[str, Value]


# Settings that bore another name before.
RENAMED = {"hand-over": "transfer-mode", "landing-mb": "staging-buffer-mb"}


class _StrictLoader(yaml.SafeLoader):
    """YAML as its specification has it, which PyYAML does not hold: a key may stand once."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            where = f"line {node.start_mark.line + 1} or below"
            raise yaml.YAMLError(f"the key {twice!r} is given twice, {where}")
        return mapping


class _Given(argparse.Action):
    """Keeps every value with the spelling that it was given under, that of a switch being true."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        earlier = vars(namespace)[self.dest] or []
        value = "true" if self.nargs == 0 else values
        if isinstance(values, list) and values:
            value = ",".join(values)
        vars(namespace)[self.dest] = [*earlier, (option_string, value)]


class OneLineParser(argparse.ArgumentParser):
    """argparse with our errors: one line, no usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_settings(
    program: str,
    description: str,
    flags: Sequence[Flag],
    foreign: ForeignFlagsByName,
    argv: Sequence[str],
    **defaults: Value,
) -> Settings:
    """Settings by name from a command line and the file it names; `defaults` fill what neither has.

    foreign: flags of other servers, each of which has a remark among the settings if it is given.
    Raises: ConfigError. Exits with 0 after --help.
    """
    parser = OneLineParser(
        prog=program,
        usage=f"{program} --model-path DIR [--flag VALUE ...] [--config FILE]",
        description=description,
        epilog="[ ] shows what an omitted flag follows. docs/FLAGS.md has the flags of SGLang and "
        "vLLM that are taken or answered besides.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win")
    builtin = {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}
    for group in GROUPS:
        shown = parser.add_argument_group(group.title)
        for flag in group.flags:
            if flag in flags:
                _add(shown, flag, defaults.get(flag.name, builtin[flag.name]))
    own, remarks = take_foreign(plain(argv), foreign)
    given, unknown = parser.parse_known_args(own)
    # Flags first: a word may be the value of one that is not known.
    unknown.sort(key=lambda word: not word.startswith("-"))
    if unknown and given.model_path is None and not unknown[0].startswith("-"):
        given.model_path = [("--model-path", unknown.pop(0))]  # as after `vllm serve`
    if unknown:
        raise ConfigError(_unknown("flag", "--", unknown[0], flags))
    settings = dict(defaults)
    if given.config is not None:
        in_file, more = read_settings(given.config, flags, foreign)
        settings |= in_file
        remarks += more
    for flag in flags:
        for where, value in vars(given)[flag.name] or ():
            settings[flag.name] = _parse(flag, where, value)
    return settings | {"remarks": remarks}


def read_settings(
    path: str, flags: Sequence[Flag], foreign: ForeignFlagsByName
) -> tuple[Settings, tuple[str, ...]]:
    """Settings and remarks from a YAML file whose keys are flags without the dashes.

    Raises: ConfigError.
    """
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except OSError as exc:
        raise ConfigError(f"--config {path}: can't be read: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        reason = " ".join(str(exc).split())
        raise ConfigError(f"--config {path}: is not a YAML file: {reason}") from exc
    if document is None:
        return {}, ()
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path}: must hold `flag: value` lines")
    by_spelling = {spelling: flag for flag in flags for spelling in flag.spellings}
    settings: Settings = {}
    remarks: tuple[str, ...] = ()
    for key, value in document.items():
        spelling = str(key).replace("_", "-")
        if spelling in foreign:
            remarks += (_remark(path, spelling, foreign, _yaml_text(value)),)
            continue
        flag = by_spelling.get(spelling)
        if flag is None:
            raise ConfigError(f"--config {path}: {_unknown('key', '', spelling, flags)}")
        if flag.name in settings:
            raise ConfigError(f"--config {path}: {spelling} is given twice")
        settings[flag.name] = _parse(flag, f"--config {path}: {spelling}", _yaml_text(value))
    return settings, remarks


def _remark(path: str, name: str, foreign: ForeignFlagsByName, value: str) -> str:
    """Raises: ConfigError if the flag can't be followed."""
    told = answer(f"--config {path}: {name}", foreign[name], value)
    if not foreign[name].row.is_harmless(value):
        raise ConfigError(told)
    return told


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
    names = settings.get("served_model_name") or (Path(model_path).name,)
    assert isinstance(names, tuple), "the flag is read as names"
    complete = settings | {
        "model_path": model_path,
        "tokenizer_path": str(Path(tokenizer_path).absolute()),
        "served_model_name": names[0],
        "model_aliases": names[1:],
    }
    if settings.get("pp_size", 1) != 1:
        complete["disable_overlap_schedule"] = True
    config = with_api_keys(msgspec.convert(complete, ServerConfig))
    check_config(config)
    return config


def _add(group: argparse._ArgumentGroup, flag: Flag, default: object) -> None:
    names = [f"--{spelling}" for spelling in flag.spellings]
    shown = flag.help
    match default:
        case bool() | "" | ():
            pass
        case str() | int():
            shown += f" (default: {default})"
        case float():
            shown += f" (default: {default:g})"
        case tuple():
            shown += f" (default: {','.join(default)})"
    group.add_argument(
        *names,
        dest=flag.name,
        action=_Given,
        nargs=0 if flag.is_switch else "+" if flag.takes_several else None,
        metavar=flag.placeholder or None,
        help=shown.replace("%", "%%"),
    )


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
    named = given.split("=")[0]
    renamed = RENAMED.get(named.lstrip("-").replace("_", "-"))
    if renamed is not None:
        return f"unknown {kind} {named!r}: it is called {prefix}{renamed} now"
    if named.lstrip("-") == "prefill":
        return f"unknown {kind} {given!r}: it is the decode server's, which dials prefill servers"
    near = difflib.get_close_matches(named, spellings, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all of them"
    return f"unknown {kind} {named!r}{hint}"
