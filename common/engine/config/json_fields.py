"""Typed reading of a checkpoint's JSON files: every wrong value is named with what is allowed.

Knows nothing of models. Values that are absent and values that are null are the same here, as they
are for the code that writes these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError, config_error

JsonValue = object


class JsonFields:
    """The members of one JSON object; `where` names the file and place in every error."""

    def __init__(self, values: Mapping[str, JsonValue], where: str) -> None:
        self.values = values
        self.where = where

    @staticmethod
    def read(path: Path) -> JsonFields:
        """Raises: ConfigError if the file can't be read or is no JSON object."""
        try:
            parsed: JsonValue = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise config_error(f"{path}: can't be read: {exc.strerror or exc}", exc) from exc
        except ValueError as exc:
            raise ConfigError(f"{path}: is not valid JSON: {exc}") from exc
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path}: must hold a JSON object, not {type(parsed).__name__}")
        return JsonFields(parsed, str(path))

    def error(self, name: str, allowed: str) -> ConfigError:
        """The error for member `name`, saying its value and what is allowed instead."""
        value = self.values.get(name)
        shown = "is missing" if value is None else f"= {json.dumps(value, default=str)[:80]}"
        return ConfigError(f"{self.where}: {name} {shown}: must be {allowed}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; `default` if absent, or required without one."""
        value = self.values.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`; `default` if absent, or required without one."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"a number above {above:g}")
        if not above < value < float("inf"):
            raise self.error(name, f"a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def object(self, name: str) -> JsonFields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return JsonFields(value, f"{self.where}: {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(name, "a list of strings")
        texts = tuple(item for item in value if isinstance(item, str))
        if len(texts) != len(value):
            raise self.error(name, "a list of strings")
        return texts

    def integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...]:
        """One integer or a list of them; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        integers = tuple(
            item
            for item in items
            if isinstance(item, int) and not isinstance(item, bool) and item >= minimum
        )
        if len(integers) != len(items):
            raise self.error(name, f"an integer of at least {minimum} or a list of them")
        return integers
