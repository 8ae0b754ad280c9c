"""What an answer or an error of another member means for the receipt. Pure."""

from __future__ import annotations

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    NonFiniteError,
    PeerUnreachableError,
    UnprovenViolationError,
)
from averaging.observe.receipts import DropCode
from averaging.protocol.messages import MessageCode

ANSWERS = {
    MessageCode.CANCELLED: DropCode.CANCELLED,
    MessageCode.INTERNAL_ERROR: DropCode.INTERNAL_ERROR,
    MessageCode.BAD_GROUP_ID: DropCode.REFUSED,
    MessageCode.PROTOCOL_VIOLATION: DropCode.REFUSED,
}
"""What a member is dropped for that sends one of these codes instead of a part or an average."""


def code_of(error: AveragingError) -> DropCode:
    """What a member is dropped for if this was raised while it was sent to or read from."""
    match error:
        case PeerUnreachableError():
            return DropCode.CONNECTION_LOST
        case CallRefusedError():
            return DropCode.REFUSED
        case NonFiniteError():
            return DropCode.NON_FINITE
        case UnprovenViolationError():
            return DropCode.OTHER_GROUP
        case _:
            return DropCode.PROTOCOL_VIOLATION
