"""The engine's tiny checkpoints, for tests that run whole workers."""

from tests.engine.conftest import tiny_checkpoint

__all__ = ["tiny_checkpoint"]
