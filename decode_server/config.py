"""The decode server's settings: it has to know where prefill servers are, or that there are none.

Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Role, ServerConfig
from common.flags.roles import parse_role


def parse_args(argv: Sequence[str]) -> ServerConfig:
    """Raises: ConfigError, one line that names the flag, the value and what is allowed."""
    text = "Receives a prompt's KV cache from a prefill server and generates the rest."
    return parse_role(Role.DECODE, text, argv, port=30001)
