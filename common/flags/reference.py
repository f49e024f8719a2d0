"""`python -m common.flags.reference`: SGLang's and vLLM's flags, as a Markdown document.

Prints `docs/FLAGS.md` from the tables that a command line is read by.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from common.flags.foreign import ANY, HARMLESS, OFF, REFUSED, ROLES, ForeignFlags
from common.flags.table import ALL_FLAGS

HEAD = """\
# Flags of SGLang and vLLM

Printed from the code: `python -m common.flags.reference > docs/FLAGS.md`.
[launch-lines.md](launch-lines.md) says how to use it.
"""


def reference() -> str:
    return "\n".join([HEAD, *_synonyms(), *_harmless(), *_refused()]) + "\n"


def _synonyms() -> Iterator[str]:
    yield "## Other names of our flags"
    yield ""
    yield "| name | is |"
    yield "|---|---|"
    for flag in ALL_FLAGS:
        ours, *others = flag.spellings
        if others:
            yield f"| {_names(others)} | `--{ours}` |"
    yield ""


def _harmless() -> Iterator[str]:
    yield "## Taken, although they change nothing"
    yield ""
    yield "| flag | because |"
    yield "|---|---|"
    for row in HARMLESS:
        assert row.harmless == ANY, f"{row.answer}: some values are refused"
        yield f"| {_names(row.names)} | {row.answer} |"
    yield ""


def _refused() -> Iterator[str]:
    yield "## Refused, with what to write instead"
    yield ""
    yield "A value that would change nothing is taken, and so is one that turns the feature off."
    yield ""
    yield "| flag | server | taken | instead |"
    yield "|---|---|---|---|"
    for row in (*ROLES, *REFUSED):
        taken = _literals(row.harmless)
        yield f"| {_names(row.names)} | {row.role or 'both'} | {taken} | {row.answer} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`--{name}`" for name in names)


def _literals(pattern: str) -> str:
    """The values that a regular expression of alternatives names, or all but which."""
    others = re.search(r"\(\?!\.\*\((.+?)\)\)", pattern)
    if others is not None:
        return f"JSON, unless it names {', '.join(others[1].split('|'))}"
    values = [value for value in pattern.split("|") if value not in OFF.split("|")]
    return ", ".join(f"`{value}`" for value in values)


def flags_of_others() -> set[str]:
    """Every name in these tables."""
    rows: tuple[ForeignFlags, ...] = (*ROLES, *HARMLESS, *REFUSED)
    return {name for row in rows for name in row.names}


if __name__ == "__main__":
    sys.stdout.write(reference())
