"""The table of errors is whole: nothing else is told, and nothing in it is only on paper."""

from __future__ import annotations

import ast
from pathlib import Path

from common.failures import FAILURES

ROOT = Path(__file__).parents[2]
TELLERS = ("Failure", "Failed", "TransferFailed", "fail", "_retry", "_fail_open", "_refuse")
PLACES = ("prefill_server", "decode_server", "common/frontend")


def told_kinds() -> set[str]:
    """Words that are given to whoever tells of an error, in calls, defaults and assignments."""
    found: set[str] = set()
    for place in PLACES:
        for path in (ROOT / place).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found & set(FAILURES)


def literal_kinds() -> set[str]:
    """Of those, what calls are given as it is."""
    found: set[str] = set()
    for place in PLACES:
        for path in (ROOT / place).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name not in TELLERS:
                    continue
                kinds = [keyword.value for keyword in node.keywords if keyword.arg == "kind"]
                for value in [*node.args, *kinds]:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found.add(value.value)
    return {kind for kind in found if kind.isidentifier()}


def test_every_kind_that_is_told_is_in_the_table() -> None:
    assert literal_kinds() <= set(FAILURES)


def test_every_kind_in_the_table_is_told_somewhere() -> None:
    assert told_kinds() == set(FAILURES)


def test_the_readme_shows_the_table() -> None:
    readme = (ROOT / "README.md").read_text()
    for kind, failure in FAILURES.items():
        statuses = ", ".join(map(str, failure.statuses))
        assert f"| `{kind}` | {statuses} | {failure.meaning} |" in readme
