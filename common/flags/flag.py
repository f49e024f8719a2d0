"""What one setting is: its names on a command line, its placeholder, its parser, and its help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.config import Role
from common.flags.values import Value


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. name: as in ServerConfig. parse: text to value, or ValueError("must be ...").

    spellings: without the dashes, the first one is used in messages. placeholder: what `--help`
        shows for the value, "" for a switch, which takes none. role: the one that has it; None:
        both. A secret one is never shown. One that takes several has its values one after the
        other, or with commas between them.
    """

    name: str
    spellings: tuple[str, ...]
    placeholder: str
    parse: Callable[[str], Value]
    help: str
    role: Role | None = None
    is_secret: bool = False
    takes_several: bool = False

    @property
    def is_switch(self) -> bool:
        return not self.placeholder


@dataclass(frozen=True, slots=True)
class Group:
    """Flags that `--help` shows under one title."""

    title: str
    flags: tuple[Flag, ...]
