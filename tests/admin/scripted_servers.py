"""Servers of a fleet that say what a test has them say, over real HTTP, and nothing else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROLE = "decode"
GROUP = {"total": 10, "used": 3, "quarantined": 1}


class ScriptedServer:
    """said: fields of its /server_info, and its `peers` in /peers. raw: sent instead of an answer.

    key, admin_key: that it asks for; "" for none. shown: (path, key) of every request. replies:
    status and body of requests that change it, by path. changes: method, path and body of those.
    """

    def __init__(self, name: str, **said: object) -> None:
        self.name = name
        self.key = self.admin_key = ""
        self.raw = b""
        self.shown: list[tuple[str, str]] = []
        self.replies: dict[str, tuple[int, object]] = {}
        self.changes: list[tuple[str, str, object]] = []
        self.said: dict[str, object] = {
            "name": name, "version": "0.1.0", "role": ROLE, "status": "ready",
            "disaggregation_mode": ROLE, "incarnation": f"of-{name}", "standby": False,
            "is_state_fresh": True, "tp_size": 2, "pp_size": 1, "page_size": 16,
            "uptime_s": 7500.0, "peers": [], "page_groups": [GROUP],
            "prefix_cache": {"token_count": 320, "host_token_count": 0, "host_token_max": 0},
            "internal_states": [{"queues": {"running": 4, "waiting": 2}}],
            **said,
        }  # fmt: skip
        self._http = ThreadingHTTPServer(("0.0.0.0", 0), _handler_of(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self.port = self._http.server_port
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def reads(self) -> int:
        return sum(path == "/server_info" for path, _ in self.shown)

    def knows(self, *others: ScriptedServer) -> None:
        self.said["peers"] = [
            {
                "incarnation": other.said["incarnation"], "state": "connected",
                "name": other.name, "http_address": other.address, "version": 7,
                "transports": ["shm"], "transfer_mode": ["direct"], "in_flight_count": 1,
                "breaker": "closed",
            }
            for other in others
        ]  # fmt: skip

    def document(self, host: str) -> dict[str, object]:
        """Of /server_info. host: that the client asked for it at."""
        return self.said

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler_of(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._may(server.key):
                return
            said = server.document(self.headers["Host"])
            is_peers = self.path == "/peers"
            self._send(200, {"peers": said["peers"], "problems": {}} if is_peers else said)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if self._may(server.admin_key or server.key):
                sent = json.loads(body) if body else None
                server.changes.append((self.command, self.path, sent))
                self._send(*server.replies[self.path.partition("?")[0]])

        do_DELETE = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _may(self, key: str) -> bool:
            shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
            server.shown.append((self.path, shown))
            if key and shown not in {key, server.admin_key} - {""}:
                # As a server that has its secrets out of order might.
                self._send(401, {"error": {"message": f"not {shown}"}})
                return False
            return True

        def _send(self, status: int, content: object) -> None:
            if server.raw:
                self.wfile.write(server.raw)
                return
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def serving(
    *names: str, kind: type[ScriptedServer] = ScriptedServer
) -> Iterator[list[ScriptedServer]]:
    servers: list[ScriptedServer] = []
    try:
        for name in names:
            servers.append(kind(name))
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def silent_listener() -> Iterator[str]:
    """The URL of a server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
