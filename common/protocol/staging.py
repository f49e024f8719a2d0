"""Messages between the ranks of two servers while a transfer is staged, and their bounds.

A prefill rank dials the address that a decode rank announced in its `StagingBufferDescriptor`:

    prefill rank                    decode rank
    puts a piece into a slot of its ring, and flushes
    SlotFilled ------------------>  scatters the slot into the pages expected for the transfer
               <------------------ SlotFreed: the slot may be written again

A SlotFilled without rows carries no piece. Its answer shows that the link works. The source repeats
a SlotFilled that was not answered; the target scatters each sequence number once.
"""

from __future__ import annotations

import msgspec

from common.protocol.bounds import GROUP_COUNT_MAX, TEXT_LENGTH_MAX
from common.protocol.value_checks import check_int
from common.request_bounds import INT64_MAX, TOKEN_COUNT_MAX

# Rows are units times cells of one rank: far above what any layout within bounds can have.
ROW_COUNT_MAX = 1 << 40
SLOT_COUNT_MAX = 1 << 20
STAGING_MESSAGE_NBYTES_MAX = 1 << 18


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A tagged struct. Its tag is the class name."""


class SlotFilled(_Message, frozen=True):
    """A piece lies in a slot, flushed. See `StagedPiece` for rows and items.

    ring: the random id under which the slots were granted; it authenticates the source rank.
    sequence: grows by one with every piece of a ring.
    """

    ring: int
    sequence: int
    slot: int
    transfer_id: int = 0
    group: int = 0
    row_first: int = 0
    row_stop: int = 0
    item_first: int = 0
    item_stop: int = 0


class SlotFreed(_Message, frozen=True):
    """The slot may be written again. error: why nothing was scattered, "" if the piece was."""

    ring: int
    sequence: int
    slot: int
    error: str = ""


StagingMessage = SlotFilled | SlotFreed


def check_slot_filled(message: SlotFilled) -> None:
    """Raises: ProtocolError naming the first field out of bounds."""
    for name, value, high in (
        ("ring", message.ring, INT64_MAX),
        ("sequence", message.sequence, INT64_MAX),
        ("slot", message.slot, SLOT_COUNT_MAX),
        ("transfer_id", message.transfer_id, INT64_MAX),
        ("group", message.group, GROUP_COUNT_MAX),
        ("row_first", message.row_first, ROW_COUNT_MAX),
        ("row_stop", message.row_stop, ROW_COUNT_MAX),
        ("item_first", message.item_first, TOKEN_COUNT_MAX),
        ("item_stop", message.item_stop, TOKEN_COUNT_MAX),
    ):
        check_int(f"SlotFilled.{name}", value, 0, high)


def check_slot_freed(message: SlotFreed) -> None:
    """Raises: ProtocolError naming the first field out of bounds."""
    check_int("SlotFreed.ring", message.ring, 0, INT64_MAX)
    check_int("SlotFreed.sequence", message.sequence, 0, INT64_MAX)
    check_int("SlotFreed.slot", message.slot, 0, SLOT_COUNT_MAX)
    check_int("length of SlotFreed.error", len(message.error), 0, TEXT_LENGTH_MAX)
