"""Typed errors, and who is meant to read each of them. Knows nothing of HTTP, ZMQ or UCX.

A `Bug` is ours and ends the process. Everything else can be caused by a user, a peer, a disk or a
device, names the offending value and what is allowed, and is answered.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of the errors that are answered rather than crash a process."""


class ConfigError(BatonError):
    """A flag, a config file or a checkpoint can't be used. Ends the start with exit code 2."""


class LayoutError(ConfigError):
    """A cache can't be cut over the asked tensor or pipeline parallel ranks."""


class RequestError(BatonError):
    """A client's request can't be served as asked. `field` names what is wrong."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status


class GrammarError(BatonError):
    """A grammar can't be read, is too large, or does not allow what was generated so far."""


class ProtocolError(BatonError):
    """A peer sent bytes or values that the protocol does not allow."""


class TransportError(BatonError):
    """UCX refused an operation. The text names the operation and UCX's status."""


class Bug(AssertionError):
    """Our own mistake. Ends the process; never caught to go on."""


class PlanMismatch(Bug):
    """A page list does not cover the item range.

    A peer's list was checked on arrival, so this is ours to fix.
    """
