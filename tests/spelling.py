"""Messages in words, to compare them where NaN is to be itself."""

from __future__ import annotations

from dataclasses import replace

from averaging.protocol.messages import AveragingData, DownloadData


def spelled(message: object) -> str:
    """Its `repr`, with the bytes of a tensor instead of where they lie."""
    if isinstance(message, AveragingData | DownloadData) and message.tensor_part is not None:
        message = replace(message, tensor_part=replace(message.tensor_part, buffer=bytes(message.tensor_part.buffer)))
    return repr(message)
