"""The commands in our Markdown files: blocks of them, and which of those can't run in a test.

A block is fenced as `sh` or `python`, or it is indented and begins with a program. One that can't
run in a test has a comment right before it: `<!-- not run in tests: needs ... -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
PAGES += [ROOT / "demo" / "README.md"]
NOT_RUN = re.compile(r"<!-- not run in tests: (needs .+) -->")
# What a command in these pages begins with; an indented block that does not is a drawing.
PROGRAMS = (
    *("make", "curl", "python", "cat", "umask", "openssl", "docker", "cd", "cp", "kubectl"),
    *("python3", "useradd", "systemctl", "pip", ".venv/bin/python", ".venv/bin/pip"),
    "baton-admin",
)


@dataclass(frozen=True, slots=True)
class Block:
    """language: sh or python. why_not: what it needs that a test has not, "" if it can run."""

    page: str
    line: int
    language: str
    text: str
    why_not: str

    @property
    def commands(self) -> list[str]:
        """Of a shell block: its lines; what a backslash, pipe, quote or loop continues is one."""
        found: list[str] = []
        pending: list[str] = []
        for line in self.text.splitlines():
            pending.append(line)
            if is_complete("\n".join(pending)):
                found.append("\n".join(pending))
                pending = []
        assert not pending, f"{self.page}:{self.line} ends in the middle of a command"
        return [command for command in found if command.strip()]


def is_complete(text: str) -> bool:
    if text.endswith(("\\", "|")):
        return False
    is_loop_open = text.startswith("for ") and not text.endswith("done")
    return re.sub(r" # .*$", "", text).count("'") % 2 == 0 and not is_loop_open


def blocks_of(page: Path) -> Iterator[Block]:
    """In the order of the page."""
    name = str(page.relative_to(ROOT))
    lines = page.read_text().splitlines()
    index = 0
    while index < len(lines):
        fence = re.match(r"( *)```(\w*)$", lines[index])
        if fence is not None:
            indent, language = fence.groups()
            end = lines.index(f"{indent}```", index + 1)
            start, index = index + 1, end + 1
        elif lines[index].startswith("    ") and lines[index].split()[0] in PROGRAMS:
            indent, language, start = "    ", "sh", index
            while index < len(lines) and (lines[index].startswith("    ") or not lines[index]):
                index += 1
            end = index
        else:
            index += 1
            continue
        if language in ("sh", "python"):
            text = "\n".join(line.removeprefix(indent) for line in lines[start:end]).strip()
            yield Block(name, start + 1, language, text, _why_not(lines, start))


def _why_not(lines: list[str], start: int) -> str:
    """What the comment says that stands before a block, with nothing but a fence or air between."""
    for line in reversed(lines[:start]):
        if line.strip() and not line.strip().startswith("```"):
            match = NOT_RUN.search(line)
            return match[1] if match else ""
    return ""


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]
