"""Connections that failed before a message could be sent, in words. Watches one socket."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.channel.sockets import Socket

_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# A listener's gate has said it already, and more.
_DIALLER_EVENTS = _EVENTS | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Handshakes:
    """The monitor of a socket, closed before it."""

    def __init__(self, socket: Socket, *, is_listening: bool, has_keys: bool) -> None:
        self._socket = socket
        self._is_listening = is_listening
        self._has_keys = has_keys
        self._monitor: Socket = socket.get_monitor_socket(
            _EVENTS if is_listening else _DIALLER_EVENTS
        )

    def sockets(self) -> tuple[Socket, ...]:
        return (self._monitor,)

    def take_failures(self) -> list[str]:
        """Why connections failed since the last call. Never waits."""
        failures: list[str] = []
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return failures
            message = parse_monitor_message(frames)
            failures.append(self._in_words(message["event"], message["value"]))

    def _in_words(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not know our key: its --curve-peer-keys-file must have it"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._has_keys:
                return "it has no keys, and we have: set its --curve-secret-key-file"
            return "it has keys, and we have none: set --curve-secret-key-file"
        # Whoever sees a mismatch first closes, and the other only sees that.
        if not self._has_keys:
            return "it closed the connection before a word was said: it may ask for keys"
        if self._is_listening:
            return "it has no keys, or another key of ours than we have"
        return "it has no keys, or another key than our --curve-peer-keys-file says"

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
