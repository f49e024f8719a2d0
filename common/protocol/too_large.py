"""What stands in for a message that its receiver does not take: too large, or out of its bounds.

Requests are held to bounds and sizes that fit before; should one break them all the same, it alone
ends, by a typed error. Pure; knows nothing of sockets.
"""

from __future__ import annotations

from common.errors import MessageTooLarge, ProtocolError
from common.protocol.frontend import Failed, Outputs, SchedulerToFrontend, Tokens
from common.protocol.peer import (
    DecodeToPrefill,
    PrefillToDecode,
    TransferDone,
    TransferFailed,
    TransferRequest,
)

KIND = "too_large"
STATUS = 400


def replacement_for_peer(
    message: DecodeToPrefill | PrefillToDecode, error: ProtocolError
) -> TransferFailed | None:
    """What a peer hears of a transfer that ended; as true as a TransferDone would have been: all
    writers are quiet. None for messages that no request depends on."""
    if not isinstance(message, TransferDone):
        return None
    transfer_id, incarnation = message.transfer_id, message.peer_incarnation
    if isinstance(error, MessageTooLarge):
        return TransferFailed(transfer_id, incarnation, KIND, str(error), STATUS, False)
    return failure_of_unread_result(transfer_id, incarnation, error)


def failure_of_unsent_request(
    message: DecodeToPrefill | PrefillToDecode, error: ProtocolError
) -> TransferFailed | None:
    """The answer to a reservation that never left: nobody writes, so its pages are quiet."""
    if not isinstance(message, TransferRequest):
        return None
    kind = KIND if isinstance(error, MessageTooLarge) else "bad_reservation"
    return TransferFailed(
        message.transfer_id, message.incarnation, kind, str(error), STATUS, is_retryable=False
    )


def failure_of_unread_result(
    transfer_id: int, incarnation: str, error: ProtocolError
) -> TransferFailed:
    """What a result is taken for that can't be read. It is the last message of its transfer all the
    same, so the writers are quiet; and another server may say it better."""
    return TransferFailed(transfer_id, incarnation, "transfer_failed", str(error), 500, True)


def told_instead(message: SchedulerToFrontend, problem: str) -> Outputs | None:
    """What a client hears in place of its tokens."""
    match message:
        case Outputs([Tokens(request_id, trace=trace)]):
            return Outputs([Failed(request_id, STATUS, KIND, problem, trace)])
    return None
