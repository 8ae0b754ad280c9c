"""Messages as text, to compare messages that contain NaN."""

from dataclasses import replace

from averaging.protocol.messages import AveragingData, DownloadData


def spelled(message: object) -> str:
    """The `repr` of a message, with the bytes of its tensor instead of the address of a buffer."""
    if isinstance(message, AveragingData | DownloadData) and message.tensor_part is not None:
        message = replace(message, tensor_part=replace(message.tensor_part, buffer=bytes(message.tensor_part.buffer)))
    return repr(message)
