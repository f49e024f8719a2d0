"""Keys that HTTP clients must show: what they may be, and where they are read from.

Knows nothing of who asks for them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from common.errors import ConfigError

API_KEY_VARIABLE = "BATON_API_KEY"
ADMIN_API_KEY_VARIABLE = "BATON_ADMIN_API_KEY"


def gather_keys(given: tuple[str, ...], flag: str, path: str, variable: str) -> tuple[str, ...]:
    """Keys of a flag, a file and the environment. Raises: ConfigError naming one of the latter."""
    found = [*given]
    if path:
        lines = (line.strip() for line in read_secret_text(flag, path).splitlines())
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"{flag} {path}: must have one key per line, and has none")
        found += check_keys(f"{flag} {path}", in_file)
    if os.environ.get(variable):
        found += check_keys(variable, os.environ[variable].split(","))
    return tuple(dict.fromkeys(found))


def check_keys(where: str, keys: list[str]) -> list[str]:
    """`keys`. Raises: ConfigError without showing any, if one can't stand in a header."""
    for number, key in enumerate(keys, 1):
        if not is_api_key(key):
            raise ConfigError(f"{where}: key {number} {API_KEY_RULE}")
    return keys


def is_api_key(text: str) -> bool:
    return 1 <= len(text) <= 512 and all("!" <= char <= "~" and char != "," for char in text)


API_KEY_RULE = "must be 1..512 printable ASCII characters without spaces and commas"


def read_secret_text(flag: str, path: str) -> str:
    """A file that only its owner, and perhaps its group, can read. Raises: ConfigError."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        text = Path(path).read_text(encoding="ascii")
    except OSError as exc:
        raise ConfigError(f"{flag} {path}: can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{flag} {path}: must be ASCII text") from exc
    if mode & 0o007:
        raise ConfigError(
            f"{flag} {path}: has mode {mode:04o}, others can read it; chmod 0600 and make new keys"
        )
    return text
