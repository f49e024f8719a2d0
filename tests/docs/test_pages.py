"""Our pages are true where a machine can tell: what is printed from the code is current, and what
they name of it, messages, flags, metrics and files, is there."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from bench.serve import settings as bench_settings
from bench.simulator import __main__ as simulator
from common.admin import __main__ as admin
from common.flags.reference import flags_of_others
from common.flags.reference import reference as foreign_flags
from common.flags.table import ALL_FLAGS
from common.layout import families
from common.layout.reference import EXAMPLES
from common.layout.reference import reference as caches
from common.metrics.reference import reference as metrics
from common.protocol.peer import Hello
from common.protocol.reference import reference as messages
from tests.docs.blocks import PAGES, ROOT, blocks_of

DOCS = sorted((ROOT / "docs").glob("*.md"))
PRINTED = {
    "MESSAGES.md": ("common.protocol", messages),
    "CACHES.md": ("common.layout", caches),
    "FLAGS.md": ("common.flags", foreign_flags),
}
WRITTEN = [page for page in DOCS if page.name not in PRINTED]
# Where messages come from; models and kernels say nothing that a page explains.
CODE = (
    "common",
    *(f"common/engine/{room}" for room in ("config", "attention", "layers")),
    *("prefill_server", "decode_server"),
)
QUIET = "common/engine/"
# Of programs that are not ours: UCX's build, and the router.
FOREIGN_FLAGS = {"with-cuda"}
PLACEHOLDER = "\0"


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_from_the_code_is_current(name: str) -> None:
    module, printed = PRINTED[name]
    is_current = (ROOT / "docs" / name).read_text() == printed()
    assert is_current, f"python -m {module}.reference > docs/{name}"


def test_every_kind_of_cache_is_printed() -> None:
    kinds = {kind for name, kind in vars(families).items() if name.endswith("_components")}
    assert kinds == set(EXAMPLES)


def test_a_message_is_printed_with_its_fields() -> None:
    text = messages()
    section = text[text.index("#### Hello") : text.index("#### Attach")]
    assert all(f"| `{name}` |" in section for name in Hello.__struct_fields__)
    assert "Opens a connection." in section


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in DOCS if f"({page.name})" not in index] == ["README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    own = [target for target in targets if not target.startswith("http")]
    assert [target for target in own if not (page.parent / target).exists()] == []


def test_flags_that_pages_name_are_there() -> None:
    known = {spelling for flag in ALL_FLAGS for spelling in flag.spellings} | flags_of_others()
    known |= {"help", "config"} | FOREIGN_FLAGS | bench_flags() | admin_flags()
    for page in WRITTEN:
        text = "".join(re.findall(r"`[^`\n]+`", page.read_text()))
        named = set(re.findall(r"--([a-z][a-z-]+)", text))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def bench_flags() -> set[str]:
    sources = [Path(module.__file__).read_text() for module in (bench_settings, simulator)]
    return set(re.findall(r"\"--([a-z-]+)\"", "".join(sources)))


def admin_flags() -> set[str]:
    """Those that servers do not have too."""
    return set(re.findall(r"\"--([a-z-]+)\"", Path(admin.__file__).read_text()))


def test_metrics_that_pages_name_are_there() -> None:
    known = set(re.findall(r"`((?:sglang|vllm|baton):\w+)", metrics()))
    for page in WRITTEN:
        named = set(re.findall(r"\b((?:sglang|vllm|baton):\w+)", page.read_text()))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


# ---- messages ------------------------------------------------------------------------------------


@lru_cache
def texts_of_the_code() -> str:
    """Every string of the code, each on a line of its own, with a mark for what is filled in."""
    found: list[str] = []
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            if QUIET in str(path) and QUIET not in f"{folder}/":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(_part(value) for value in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[.\d]*[sdfgx]", PLACEHOLDER, node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else PLACEHOLDER


def is_said(message: str) -> bool:
    """Whether some text of the code reads so; words in capitals stand for what is filled in."""
    filled_in = f"[^\n]*{PLACEHOLDER}[^\n]*"
    pattern = "".join(
        f"(?:{filled_in}|{word})" if word.isupper() and word.isalpha() else re.escape(word)
        for word in re.split(r"\b([A-Z]{3,})\b", message)
    )
    return re.search(pattern, texts_of_the_code()) is not None


def messages_of(page: str) -> list[str]:
    """First cells of the tables that are headed `message`."""
    found: list[str] = []
    is_inside = False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if not line.startswith("|"):
            is_inside = False
        elif line.startswith("| message |"):
            is_inside = True
        elif is_inside and not line.startswith("|---"):
            match = re.match(r"\| `([^`]+)` \|", line)
            assert match is not None, line
            found.append(match[1])
    return found


@pytest.mark.parametrize("message", messages_of("troubleshooting.md"))
def test_a_message_that_is_explained_is_one_of_ours(message: str) -> None:
    assert is_said(message)


def test_a_message_of_nobody_is_noticed() -> None:
    assert is_said("lost ROLE server ADDRESS: REASON")
    assert not is_said("lost ROLE server ADDRESS because of REASON")
    assert not is_said("lost ROLE server of ADDRESS: REASON")


def test_an_unmarked_block_would_run() -> None:
    (build,) = [b for b in blocks_of(ROOT / "deploy" / "README.md") if "docker build" in b.text]
    assert build.why_not == "needs Docker"
    (health,) = [b for b in blocks_of(ROOT / "docs" / "quick-start.md") if "/requests" in b.text]
    assert (health.why_not, health.language) == ("", "sh")
    assert health.commands == ["curl http://127.0.0.1:30001/requests"]
