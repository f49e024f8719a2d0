"""Which doors a server warns of at its start."""

from __future__ import annotations

import pytest

from common.config import ReturnCache, Role, ServerConfig, TransferMode
from common.runtime.exposure import open_doors

NO_RETURNS = {"return_cache": ReturnCache.OFF}
KEYS = {"curve_secret_key_file": "s", "curve_peer_keys_file": "p"}
HTTP, BOOTSTRAP, STAGING, NODES = "HTTP", "--bootstrap-port", "the ports where", "torch's store"
WORKERS = "the port of workers"
SWITCHES = {"enable_role_switch": True}
CACHES, UCX_TCP = "caches that arrive over a network", "--transport ucx-tcp: UCX listens"


@pytest.mark.parametrize(
    ("role", "changes", "doors"),
    [
        (Role.PREFILL, {}, []),
        (Role.PREFILL, {"host": "localhost"}, []),
        (Role.PREFILL, {"host": "::1"}, []),
        (Role.PREFILL, {"host": "127.9.9.9"}, []),
        (Role.PREFILL, {"host": "0.0.0.0"}, [HTTP, BOOTSTRAP, STAGING, CACHES]),
        (Role.PREFILL, {"host": "::"}, [HTTP, BOOTSTRAP, STAGING, CACHES]),
        (Role.PREFILL, {"host": "gpu-7"}, [HTTP, BOOTSTRAP, STAGING, CACHES]),
        (Role.PREFILL, {"host": "0.0.0.0", **NO_RETURNS}, [HTTP, BOOTSTRAP]),
        (Role.PREFILL, {"host": "0.0.0.0", "api_keys": ("k",), **NO_RETURNS}, [BOOTSTRAP]),
        (
            Role.PREFILL,
            {"host": "gpu-7", "admin_api_keys": ("k",), **NO_RETURNS},
            [HTTP, BOOTSTRAP],
        ),
        (Role.PREFILL, {"host": "0.0.0.0", **KEYS}, [HTTP]),
        (Role.PREFILL, {"host": "gpu-7", "transfer_mode": TransferMode.DIRECT, **KEYS}, [HTTP]),
        (Role.PREFILL, {"nnodes": 2, "dist_init_addr": "a:1", **KEYS}, [NODES]),
        (Role.PREFILL, {"nnodes": 2, "dist_init_addr": "a:1"}, [NODES, WORKERS]),
        (Role.DECODE, {"host": "0.0.0.0"}, [HTTP]),
        (Role.DECODE, {"prefill": ("127.0.0.1:1", "[::1]:2")}, []),
        (Role.DECODE, {"prefill": ("127.0.0.1:1", "gpu-7:1")}, [STAGING, CACHES]),
        (Role.DECODE, {"prefill": ("gpu-7:1",), "transfer_mode": TransferMode.DIRECT}, [CACHES]),
        (Role.DECODE, {"prefill": ("gpu-7:1",), "transport": "shm"}, [STAGING]),
        (Role.DECODE, {"prefill": ("127.0.0.1:1",), "transport": "ucx-tcp"}, [UCX_TCP]),
        (Role.PREFILL, {"transport": "ucx-tcp", **KEYS}, [UCX_TCP]),
        (Role.DECODE, {"prefill": ("gpu-7:1",), **KEYS}, []),
        (Role.DECODE, {"prefill": ("127.0.0.1:1",), **SWITCHES}, []),
        (Role.DECODE, {"host": "0.0.0.0", **SWITCHES}, [HTTP, BOOTSTRAP, STAGING, CACHES]),
        (Role.DECODE, {"host": "0.0.0.0", **SWITCHES, **KEYS}, [HTTP]),
        (Role.PREFILL, {"prefill": ("gpu-7:1",), **SWITCHES}, [STAGING, CACHES]),
    ],
)
def test_every_open_door_is_named_with_what_to_set(
    role: Role, changes: dict[str, object], doors: list[str]
) -> None:
    plain: dict[str, object] = {"model_path": "m", "tokenizer_path": "m", "port": 1}
    config = ServerConfig(role=role, served_model_name="m", **{**plain, **changes})  # type: ignore[arg-type]
    found = open_doors(config)
    assert len(found) == len(doors)
    for line, start in zip(found, doors, strict=True):
        assert line.startswith(start) and "\n" not in line
