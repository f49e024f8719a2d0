"""What servers of an earlier release say, and what they understand.

A core of this release stands for theirs: it does what was agreed on, as the version of a connection
says. Here it agrees on no more than that version, says nothing that came later, and hears nothing
of it. So whoever counts on more than was agreed on is not understood.
"""

from __future__ import annotations

import msgspec

from common.protocol.peer import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Offer,
    PeerMessage,
    TransferDone,
    TransferRequest,
    Welcome,
)

FIRST = 1
# Fields that came after the first release. Every one has a default.
LATER_FIELDS: dict[type, tuple[str, ...]] = {
    Hello: ("sends_rest",),
    Welcome: ("sends_rest",),
    Heartbeat: ("cached_prefixes",),
    TransferRequest: ("prefix_digests", "token_start", "claim", "seeds"),
    TransferDone: ("first_tokens", "proposals"),
}
LATER_KINDS = (Offer,)


def said(message: PeerMessage, version: int) -> PeerMessage:
    """By a server of this version."""
    if version == PROTOCOL_VERSION:
        return message
    assert not isinstance(message, LATER_KINDS), f"version {version} has no {message}"
    if isinstance(message, Hello):
        message = msgspec.structs.replace(message, version_max=version)
    return _known(message)


def heard(message: PeerMessage, version: int) -> PeerMessage:
    """By a server of this version. Raises: AssertionError if it can't read the message."""
    if version == PROTOCOL_VERSION:
        return message
    name = type(message).__name__
    assert not isinstance(message, LATER_KINDS), f"a server of version {version} was sent {name}"
    if isinstance(message, Hello):
        newest = min(message.version_max, version)
        message = msgspec.structs.replace(message, version_max=newest)
    return _known(message)


def _known(message: PeerMessage) -> PeerMessage:
    """Without what came later: that is left out, as on the wire."""
    later = LATER_FIELDS.get(type(message), ())
    fields = {field.name: field for field in msgspec.structs.fields(message)}
    return msgspec.structs.replace(message, **{name: _default(fields[name]) for name in later})


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
