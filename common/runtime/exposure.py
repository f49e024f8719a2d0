"""What of a server is open to others although no key guards it, in words for its operator. Pure."""

from __future__ import annotations

import ipaddress

from common.config import ServerConfig


def open_doors(config: ServerConfig) -> list[str]:
    """One line for every port that other machines reach without a key, and what to set."""
    doors: list[str] = []
    is_reachable = not _is_loopback(config.host)
    if is_reachable and not config.api_keys:
        doors.append(
            f"HTTP on --host {config.host} is open to everybody who reaches it: "
            "set --api-key-file, or --host 127.0.0.1 behind a proxy"
        )
    if config.nnodes > 1:
        doors.append(
            f"the ports of --dist-init-addr {config.dist_init_addr} and the next one have no keys: "
            "let only the machines of this server reach them"
        )
    return doors


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
