"""The prefill server's settings: the common ones and the port its decode servers dial.

Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Role, ServerConfig
from common.flags.roles import parse_role


def parse_args(argv: Sequence[str]) -> ServerConfig:
    """Raises: ConfigError, one line that names the flag, the value and what is allowed."""
    text = "Computes a prompt's KV cache and first token, and puts the cache into a decode server."
    return parse_role(Role.PREFILL, text, argv, port=30000)
