"""Typed errors, and who is meant to read each of them. Knows nothing of HTTP, ZMQ or UCX.

A `Bug` is ours and ends the process. Everything else can be caused by a user, a peer, a disk or a
device, names the offending value and what is allowed, and is answered.
"""

from __future__ import annotations

import errno
import socket

# What the system says of a file or an address that will be no better when it is asked again.
PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
    }
)


class BatonError(Exception):
    """Root of the errors that are answered rather than crash a process."""


class ConfigError(BatonError):
    """A flag, a config file or a checkpoint can't be used. Ends the start with exit code 2."""


class NotNow(ConfigError):
    """A setting is in order, but can't be honoured at the moment: a port is in use, a name does not
    resolve yet, others have the memory. Ends the start with exit code 75."""


def config_error(text: str, cause: OSError) -> ConfigError:
    """The error of a setting that the system refuses: for good, or only now. `cause` says which; a
    name that is not found (`socket.gaierror`) may be found later."""
    is_permanent = not isinstance(cause, socket.gaierror) and cause.errno in PERMANENT_ERRNOS
    return ConfigError(text) if is_permanent else NotNow(text)


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
    """Bytes or values that the protocol does not allow: a peer sent them, or we would have."""


class MessageTooLarge(ProtocolError):
    """A message of ours has more bytes than its receiver takes. It was not sent."""


class TransportError(BatonError):
    """UCX refused an operation. The text names the operation and UCX's status."""


class Bug(AssertionError):
    """Our own mistake. Ends the process; never caught to go on."""


class PlanMismatch(Bug):
    """A page list does not cover the item range.

    A peer's list was checked on arrival, so this is ours to fix.
    """
