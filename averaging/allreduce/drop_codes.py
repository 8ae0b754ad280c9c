"""Maps answers and errors of other members to the drop codes of receipts. Pure."""

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
"""The drop code of a member that sends one of these messages instead of a part or an average."""


def code_of(error: AveragingError) -> DropCode:
    """The drop code of a member if `error` was raised while this peer sent to it or read from it."""
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
