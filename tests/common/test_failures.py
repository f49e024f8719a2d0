"""The kinds of failure: every one is raised somewhere, has one status, and is explained."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from common.failures import FailureKind

ROOT = Path(__file__).parents[2]
PLACES = (
    *("prefill_server", "decode_server"),
    *("common/frontend", "common/protocol", "common/scheduling", "common/transfers"),
)


def nodes() -> Iterator[ast.AST]:
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py"):
            yield from ast.walk(ast.parse(path.read_text()))


def test_every_kind_is_raised_somewhere() -> None:
    """By its member, or by its word where a batcher or a frontend has no other name for it."""
    words = {node.value for node in nodes() if isinstance(node, ast.Constant)}
    members = {node.attr for node in nodes() if isinstance(node, ast.Attribute)}
    assert {kind for kind in FailureKind if kind not in words and kind.name not in members} == set()


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_has_an_error_status(kind: FailureKind) -> None:
    """499 is nginx's for a client that went away; HTTPStatus has no name for it."""
    assert 400 <= kind.status < 600
    assert kind.status == 499 or HTTPStatus(kind.status)


def test_a_kind_of_a_newer_peer_is_a_failed_transfer() -> None:
    assert FailureKind.of("moon_in_the_way") is FailureKind.TRANSFER_FAILED
    assert all(FailureKind.of(str(kind)) is kind for kind in FailureKind)


def test_troubleshooting_explains_every_kind() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for kind in FailureKind:
        assert f"| `{kind}` | {kind.status} |" in page
