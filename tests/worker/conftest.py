"""The engine's tiny checkpoints, for tests that run whole workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import tiny_checkpoint
from tests.engine.tiny_checkpoints import Reference

__all__ = ["tiny_checkpoint"]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Reference:
    return Reference.load(checkpoint)
