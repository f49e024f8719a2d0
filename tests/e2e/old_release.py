"""Servers from the tree of an earlier release, beside those of this one.

The tree comes out of the repository's history; a clone without one has no earlier release. What is
built, the C++ modules, is this release's: the processes of a server speak to it by its Python API,
which has not changed since. Between servers nothing but messages and bytes of caches passes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, Node

ROOT = Path(__file__).parents[2]
RELEASES = {1: "23b31c38efe22919ad5f7fc9190e61c031af0e2c"}
"""The last commit of each version of the protocol that is still spoken."""

# An editable installation leads every import to this tree, whatever the path says.
WITHOUT_INSTALLATION = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
"""


def tree_of(version: int, directory: Path) -> Path:
    """The tree of a release, written to a directory. Skips the test if the clone has none of it."""
    commit = RELEASES[version]
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False
    )
    if archive.returncode != 0:
        pytest.skip(f"the history of this clone has no {commit[:7]}: {archive.stderr.decode()}")
    tree = directory / f"release-{version}"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    (tree / "sitecustomize.py").write_text(WITHOUT_INSTALLATION)
    return tree


@contextmanager
def of_tree(tree: Path) -> Iterator[None]:
    """Servers that are started meanwhile are those of a tree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tree)]))
        patch.setenv("PYTHONSAFEPATH", "1")
        yield


def start_of_tree(fleet: Fleet, node: Node, tree: Path | None) -> None:
    """Start a node from a tree; None for this one."""
    with of_tree(tree) if tree is not None else nullcontext():
        fleet.start(node)
