"""Fixtures of the engine's tests: tiny checkpoints, built once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_checkpoints import RECIPES, build_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a recipe's name to its checkpoint directory; do not write into it."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = build_checkpoint(RECIPES[name], tmp_path_factory.mktemp(name))
        return built[name]

    return get
