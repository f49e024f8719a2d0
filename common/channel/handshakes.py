"""Failed handshakes of one socket, with reasons, and breaks of its connection."""

from __future__ import annotations

from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.channel.sockets import Socket

_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# Not for a listener: its gate reports unknown keys, with the address.
_FAILURES = _EVENTS | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_DIALLER_EVENTS = (
    _FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)


class Break(Enum):
    """BROKEN: an established connection is gone. REFUSED: and its address refuses a new one."""

    BROKEN = "broken"
    REFUSED = "refused"


class Handshakes:
    """The monitor of a socket, closed before it. Its owner calls `look` once for every wake-up, and
    then takes the failures and breaks."""

    def __init__(self, socket: Socket, *, is_listening: bool, has_keys: bool) -> None:
        self._socket = socket
        self._is_listening = is_listening
        self._has_keys = has_keys
        self._monitor: Socket = socket.get_monitor_socket(
            _EVENTS if is_listening else _DIALLER_EVENTS
        )
        self._failures: list[str] = []
        self._breaks: list[Break] = []
        self._is_up = False
        self._was_up = False

    def sockets(self) -> tuple[Socket, ...]:
        return (self._monitor,)

    @property
    def has_news(self) -> bool:
        """Whether failures or breaks wait to be taken."""
        return bool(self._failures or self._breaks)

    def take_failures(self) -> list[str]:
        """Reasons of failed connections, as far as `read_events` has seen."""
        failures, self._failures = self._failures, []
        return failures

    def take_breaks(self) -> list[Break]:
        """Breaks of a dialler's established connection, as far as `read_events` has seen."""
        breaks, self._breaks = self._breaks, []
        return breaks

    def read_events(self) -> None:
        """Read all events, so that none wakes the poller again. Never waits."""
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = parse_monitor_message(frames)
            event = message["event"]
            if event & _FAILURES:
                self._failures.append(self._in_words(event, message["value"]))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up, self._was_up = True, False
            elif event == zmq.EVENT_DISCONNECTED and self._is_up:
                self._is_up, self._was_up = False, True
                self._breaks = [Break.BROKEN]  # replaces earlier ones, which are obsolete
            elif event == zmq.EVENT_CLOSED and self._was_up:
                # The first attempt to connect again failed. Later failures add nothing.
                self._was_up = False
                self._breaks.append(Break.REFUSED)

    def _in_words(self, event: int, value: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the peer does not know our key: add it to its --curve-peer-keys-file"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._has_keys:
                return (
                    "the peer has no CURVE keys, and we have: set its --curve-secret-key-file and "
                    "--curve-peer-keys-file"
                )
            return (
                "the peer requires CURVE keys, and we have none: set --curve-secret-key-file and "
                "--curve-peer-keys-file"
            )
        # The side that sees a mismatch first closes. The other side only sees the end.
        if not self._has_keys:
            return "closed during the ZMTP handshake; the peer may require CURVE keys"
        if self._is_listening:
            return (
                "closed during the CURVE handshake; the peer has no keys, or a wrong key of ours "
                "in its --curve-peer-keys-file"
            )
        return (
            "closed during the CURVE handshake; the peer has no keys, or another key than our "
            "--curve-peer-keys-file says"
        )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
