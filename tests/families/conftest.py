"""The engine's tiny checkpoints."""

from __future__ import annotations

from tests.engine.conftest import tiny_checkpoint

__all__ = ["tiny_checkpoint"]
