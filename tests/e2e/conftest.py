"""A fleet of real servers per test module, and the engine's tiny checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet
from tests.engine.conftest import tiny_checkpoint

__all__ = ["fleet", "tiny_checkpoint"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No servers yet; whatever a module starts is gone after it."""
    with Fleet(tmp_path_factory.mktemp("logs")) as started:
        yield started
