"""Makes the transport of a rank's caches, as `--transport` names it."""

from __future__ import annotations

import torch

from common.config import ServerConfig
from common.errors import ConfigError, TransportError
from common.transport.auto import AutoTransport
from common.transport.connections import Connections
from common.transport.stream import StreamSettings, StreamTransport
from common.transport.transport import Transport
from common.transport.ucx import UcxSettings, UcxTransport

PRIVATE_TRANSPORTS = ("stream", "ucx-tcp")
"""Transports whose pools on a CPU are not in shared memory."""


def start_transport(config: ServerConfig, device: torch.device) -> Transport:
    """Raises: ConfigError naming the flags."""
    try:
        return _make_transport(config, device.index if device.type == "cuda" else None)
    except TransportError as exc:
        asked = f"--transport {config.transport} --net-devices {config.net_devices}"
        raise ConfigError(f"{asked} --ucx {config.ucx}: {exc}") from exc


def _make_transport(config: ServerConfig, cuda_device: int | None) -> Transport:
    connections = Connections()
    if config.transport == "stream":
        return StreamTransport(_stream_settings(config), connections)
    ucx = UcxTransport(_ucx_settings(config, cuda_device), connections)
    if config.transport == "auto":
        return AutoTransport(ucx, StreamTransport(_stream_settings(config), connections))
    return ucx


def _ucx_settings(config: ServerConfig, cuda_device: int | None) -> UcxSettings:
    tls = {"auto": "auto", "shm": "posix", "ucx-tcp": "tcp"}[config.transport]
    if cuda_device is not None and config.transport == "ucx-tcp":
        tls += ",cuda_copy,cuda_ipc"
    return UcxSettings(
        tls=tls,
        net_devices=config.net_devices,
        ports=config.transfer_port_range,
        ucx=config.ucx,
        cuda_device=cuda_device,
    )


def _stream_settings(config: ServerConfig) -> StreamSettings:
    """Encrypted where the control channel is, which carries the secrets."""
    return StreamSettings(
        is_encrypted=bool(config.curve_secret_key_file), ports=config.transfer_port_range
    )
