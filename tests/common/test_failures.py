"""The table of errors is whole: nothing else is told, and nothing in it is only on paper."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from common.failures import FAILURES

ROOT = Path(__file__).parents[2]
TELLERS = ("Failure", "Failed", "TransferFailed", "fail", "_retry", "_fail_open", "_refuse")
PLACES = (
    *("prefill_server", "decode_server"),
    *("common/frontend", "common/protocol", "common/scheduling"),
)


def nodes() -> Iterator[ast.AST]:
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py"):
            yield from ast.walk(ast.parse(path.read_text()))


def words_told() -> set[str]:
    """Words that calls give to whoever tells of an error."""
    found: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TELLERS:
            kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
            for value in (*node.args, *kinds):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.add(value.value)
    return {word for word in found if word.isidentifier()}


def test_every_kind_that_is_told_is_in_the_table() -> None:
    assert words_told() and words_told() <= set(FAILURES)


def test_every_kind_in_the_table_is_told_somewhere() -> None:
    words = {node.value for node in nodes() if isinstance(node, ast.Constant)}
    assert set(FAILURES) <= words


def test_troubleshooting_explains_the_table() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for kind, statuses in FAILURES.items():
        assert f"| `{kind}` | {' or '.join(map(str, statuses))} |" in page
