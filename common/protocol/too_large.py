"""Replacements for messages that their receiver would refuse: too large, or out of bounds.

Bounds on requests keep messages small enough. If a message is too large all the same, only its
request ends, with a typed error. Pure; knows nothing of sockets.
"""

from __future__ import annotations

from common.errors import MessageTooLarge, ProtocolError
from common.failures import Failure, FailureKind
from common.protocol.frontend import Failed, Outputs, SchedulerToFrontend, Tokens
from common.protocol.peer import (
    DecodeToPrefill,
    PrefillToDecode,
    TransferDone,
    TransferFailed,
    TransferRequest,
)


def replacement_for_peer(
    message: DecodeToPrefill | PrefillToDecode, error: ProtocolError
) -> TransferFailed | None:
    """The message that a peer gets in place of a TransferDone. It proves as much: all writers are
    quiet. None for messages that no request depends on."""
    if not isinstance(message, TransferDone):
        return None
    transfer_id, incarnation = message.transfer_id, message.peer_incarnation
    if isinstance(error, MessageTooLarge):
        failure = Failure(FailureKind.TOO_LARGE, str(error))
        return TransferFailed.of(transfer_id, incarnation, failure)
    return failure_of_unread_result(transfer_id, incarnation, error)


def failure_of_unsent_request(
    message: DecodeToPrefill | PrefillToDecode, error: ProtocolError
) -> TransferFailed | None:
    """The answer to a reservation that never left. No rank writes, so its pages are quiet."""
    if not isinstance(message, TransferRequest):
        return None
    is_large = isinstance(error, MessageTooLarge)
    kind = FailureKind.TOO_LARGE if is_large else FailureKind.BAD_RESERVATION
    return TransferFailed.of(message.transfer_id, message.incarnation, Failure(kind, str(error)))


def failure_of_unread_result(
    transfer_id: int, incarnation: str, error: ProtocolError
) -> TransferFailed:
    """The failure that stands for a result that can't be read. A result is the last message of its
    transfer, so the writers are quiet. Another prefill server may send a readable one."""
    failure = Failure(FailureKind.TRANSFER_FAILED, str(error), is_retryable=True)
    return TransferFailed.of(transfer_id, incarnation, failure)


def replacement_for_frontend(message: SchedulerToFrontend, problem: str) -> Outputs | None:
    """The failure that a client gets in place of its tokens."""
    match message:
        case Outputs([Tokens(request_id, trace=trace)]):
            failure = Failure(FailureKind.TOO_LARGE, problem)
            return Outputs([Failed.of(request_id, failure, trace)])
    return None
