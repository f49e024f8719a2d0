"""What is said in place of a message that its receiver would not take for its size. Pure.

Requests are held to sizes that fit before; should one be too large all the same, it alone ends, by
a typed error. Knows nothing of sockets.
"""

from __future__ import annotations

from common.protocol.frontend import Failed, SchedulerToFrontend, Tokens
from common.protocol.peer import (
    DecodeToPrefill,
    PrefillToDecode,
    TransferDone,
    TransferFailed,
    TransferRequest,
)

KIND = "too_large"
STATUS = 400


def said_instead(message: DecodeToPrefill | PrefillToDecode, problem: str) -> TransferFailed | None:
    """What a peer hears of a hand-over that ended; as true as a TransferDone would have been: all
    writers are quiet. None of what no request hangs on."""
    if isinstance(message, TransferDone):
        return _failed(message.transfer_id, message.peer_incarnation, problem)
    return None


def answered_instead(
    message: DecodeToPrefill | PrefillToDecode, problem: str
) -> TransferFailed | None:
    """The answer to a reservation that never left: nobody writes, so its pages are quiet."""
    if isinstance(message, TransferRequest):
        return _failed(message.transfer_id, message.incarnation, problem)
    return None


def told_instead(message: SchedulerToFrontend, problem: str) -> Failed | None:
    """What a client hears in place of its tokens."""
    if isinstance(message, Tokens):
        return Failed(message.request_id, STATUS, KIND, problem, message.trace)
    return None


def _failed(transfer_id: int, incarnation: str, problem: str) -> TransferFailed:
    return TransferFailed(transfer_id, incarnation, KIND, problem, STATUS, is_retryable=False)
