"""Authentication of diallers: answers ZMQ's question (ZAP) for every key that a dialler has proved.

Runs on the thread of the loop that owns it, between two polls. Knows nothing of messages.
"""

from __future__ import annotations

import zmq

from common.channel.keys import Curve
from common.channel.sockets import Socket

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAME_COUNT = 7
DOMAIN = b"baton"


class Gate:
    """Owner of a ZMQ context in which only peers whose key is known can connect.

    A context has one such authority, so every gate brings its own. Close it after its listeners.
    """

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._context = zmq.Context[Socket]()
        self._socket: Socket = self._context.socket(zmq.REP)
        self._socket.bind(ZAP_ADDRESS)
        self._refusals: list[str] = []

    @property
    def context(self) -> zmq.Context[Socket]:
        return self._context

    @property
    def public_key(self) -> str:
        """Our public key, which diallers need, in hexadecimal."""
        return self._curve.pair.public.hex()

    def guard(self, socket: Socket) -> None:
        """Let only known keys connect to a socket of this gate's context. Before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without this ZMQ accepts every connection while no ZAP socket is bound.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def allows(self, user: str) -> bool:
        """Whether the key of an accepted connection is still allowed."""
        return self._curve.peers.allows(bytes.fromhex(user))

    def sockets(self) -> tuple[Socket, ...]:
        return (self._socket,)

    def answer(self) -> None:
        """Accept or refuse the waiting connections. Never waits."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            assert len(frames) == ZAP_FRAME_COUNT, "libzmq asks in seven frames"
            _, request_id, _, address, _, mechanism, key = frames
            user = key.hex()
            if mechanism == b"CURVE" and self._curve.peers.allows(key):
                reply = [b"200", b"OK", user.encode(), b""]
            else:
                self._refusals.append(f"key {user} of {address.decode('ascii', 'replace')}")
                reply = [b"400", b"unknown key", b"", b""]
            self._socket.send_multipart([ZAP_VERSION, request_id, *reply])

    def take_refusals(self) -> list[str]:
        """Refused keys since the last call, with their addresses."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def close(self, linger_ms: int = 0) -> None:
        """After the sockets that it guards, whose last messages leave within `linger_ms`. Harmless
        if closed."""
        self._socket.close(0)
        if linger_ms and not self._context.closed:
            self._context.term()
        self._context.destroy(linger=0)
