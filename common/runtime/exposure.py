"""Ports of a server that no key guards, as log lines for its operator. Pure."""

from __future__ import annotations

import ipaddress

from common.config import Role, ServerConfig, TransferMode
from common.prefill_entries import fixed_addresses


def open_doors(config: ServerConfig) -> list[str]:
    """One line for every port that other machines reach without a key, with the remedy.

    A server that may change its role is warned of the ports of both.
    """
    doors: list[str] = []
    is_reachable = not _is_loopback(config.host)
    if is_reachable and not config.api_keys:
        doors.append(
            f"HTTP on --host {config.host} is open to every client: "
            "set --api-key-file, or --host 127.0.0.1 behind a proxy"
        )
    has_keys = bool(config.curve_secret_key_file)
    if is_reachable and _may_be(config, Role.PREFILL) and not has_keys:
        doors.append(
            f"--bootstrap-port {config.bootstrap_port} on --host {config.host} is open to every "
            "decode server: set --curve-secret-key-file and --curve-peer-keys-file"
        )
    if _has_open_staging(config) and not has_keys:
        doors.append(
            "the ports where staged transfers are announced are open to every process: set "
            "--curve-secret-key-file and --curve-peer-keys-file, or --transfer-mode direct"
        )
    if config.transport == "ucx-tcp":
        doors.append(
            f"--transport ucx-tcp: UCX listens on every address of --net-devices "
            f"{config.net_devices}, and every process that reaches those ports can write anywhere "
            "in this server's workers, keys or not: let only its peers reach them, or set "
            "--transport auto"
        )
    elif _has_far_writers(config) and not has_keys and config.transport != "shm":
        doors.append(
            "caches that arrive over a network are not encrypted: set --curve-secret-key-file and "
            "--curve-peer-keys-file"
        )
    if config.nnodes > 1:
        doors.append(
            f"torch's store at --dist-init-addr {config.dist_init_addr} listens on every address "
            "and knows no keys, nor do the collectives: let only the machines of this server reach "
            "each other's ports"
        )
        if not has_keys:
            doors.append(
                f"the port of workers on other machines, {config.scheduler_address}, is open: set "
                "--curve-secret-key-file and --curve-peer-keys-file on all of them"
            )
    return doors


def _has_open_staging(config: ServerConfig) -> bool:
    """A rank that receives caches listens where its peers reach it."""
    return config.transfer_mode is not TransferMode.DIRECT and _has_far_writers(config)


def _has_far_writers(config: ServerConfig) -> bool:
    if _may_be(config, Role.PREFILL) and config.receives_caches and not _is_loopback(config.host):
        return True
    if not _may_be(config, Role.DECODE):
        return False
    fixed = fixed_addresses(config.prefill)
    hosts = [address.rpartition(":")[0].strip("[]") for address in fixed]
    return len(fixed) < len(config.prefill) or not all(map(_is_loopback, hosts))


def _may_be(config: ServerConfig, role: Role) -> bool:
    return config.role is role or config.enable_role_switch


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
