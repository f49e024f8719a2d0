"""Takes the flags of other servers out of a command line, and answers those of a file.

Knows none of them by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from common.errors import ConfigError
from common.flags.foreign import ForeignFlag, Takes

ForeignFlagsByName = Mapping[str, ForeignFlag]
_NAME = re.compile(r"--?(?P<name>[A-Za-z][\w.+-]*)(?P<rest>=.*)?", re.DOTALL)


def plain(argv: Sequence[str]) -> list[str]:
    """`argv` with the names of flags spelled in one way: vLLM takes --max_model_len and -tp too."""
    return [_plain(word) for word in argv]


def _plain(word: str) -> str:
    match = _NAME.fullmatch(word)
    if match is None or len(match["name"]) == 1:
        return word
    return f"--{match['name'].replace('_', '-')}{match['rest'] or ''}"


def take_foreign(
    argv: Sequence[str], foreign: ForeignFlagsByName
) -> tuple[list[str], tuple[str, ...]]:
    """`argv`, plain, without the flags of other servers, and a line on each that changes nothing.

    Raises: ConfigError that names all of them that can't be followed, with what to write instead.
    """
    left: list[str] = []
    remarks: list[str] = []
    refusals: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        match = _NAME.fullmatch(word)
        name = match["name"] if match and word.startswith("--") else ""
        flag = foreign.get(_whole(name))
        if match is None or flag is None:
            left.append(word)
            continue
        value = match["rest"][1:] if match["rest"] else _values(name, flag.takes, words)
        told = remarks if flag.row.is_harmless(value) else refusals
        told.append(answer(f"--{name}", flag, value))
    if refusals:
        raise ConfigError("; ".join(refusals))
    return left, tuple(remarks)


def answer(shown: str, flag: ForeignFlag, value: str) -> str:
    """Why a flag changes nothing, or what to write instead; its value is shown as it was given."""
    if flag.takes is not Takes.NOTHING:
        shown += f" {value if value.isprintable() and ' ' not in value and value else repr(value)}"
    is_harmless = flag.row.is_harmless(value)
    return f"{shown}{' changes nothing here' if is_harmless else ''}: {flag.row.answer}"


def _whole(name: str) -> str:
    """vLLM takes --kv-transfer-config.kv_role for one member of a JSON value."""
    return name.partition(".")[0]


def _values(name: str, takes: Takes, words: list[str]) -> str:
    """What follows a flag, taken out of `words`. Raises: ConfigError."""
    if takes is Takes.NOTHING:
        return "true"
    taken: list[str] = []
    while words and not _NAME.fullmatch(words[0]):
        taken.append(words.pop(0))
        if takes is Takes.VALUE:
            break
    if not taken:
        raise ConfigError(f"argument --{name}: expected one argument")
    return " ".join(taken)
