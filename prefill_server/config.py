"""The prefill server's settings: the common ones and the port its decode servers dial.

Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import DEFAULT_BOOTSTRAP_PORT, Role, ServerConfig
from common.flag_reading import parse_settings, to_config
from common.flag_values import number, port, switch
from common.flags import COMMON_FLAGS, Flag

FLAGS = (
    *COMMON_FLAGS,
    Flag(
        "bootstrap_port",
        ("bootstrap-port", "disaggregation-bootstrap-port"),
        port,
        "where decode servers dial",
    ),
    Flag(
        "bootstrap_timeout_s",
        ("bootstrap-timeout",),
        number(0.1, 86400),
        "seconds that half of a routed request waits, or a cache that was computed first",
    ),
    Flag(
        "serve_plain",
        ("serve-plain",),
        switch,
        "answer requests without a room as well: a connected decode server generates, and is shown "
        "an admin key",
        is_switch=True,
    ),
)


def parse_args(argv: Sequence[str]) -> ServerConfig:
    """Raises: ConfigError, one line that names the flag, the value and what is allowed."""
    settings = parse_settings(
        "baton-prefill",
        "Computes a prompt's KV cache and first token, and puts the cache into a decode server.",
        FLAGS,
        argv,
        host="127.0.0.1",
        port=30000,
        bootstrap_port=DEFAULT_BOOTSTRAP_PORT,
    )
    return to_config(settings | {"role": Role.PREFILL})
