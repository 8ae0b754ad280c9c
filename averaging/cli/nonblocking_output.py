"""Writing where nobody may read: a full pipe or a terminal that is stopped holds up no peer, and no signal to it."""

from __future__ import annotations

import errno
import os
import select
import threading
from concurrent.futures import Future
from typing import TextIO

PATIENCE = 1.0
"""Seconds for which a reader that lags behind is waited for."""


class NonblockingOutput:
    """Writes to one of the standard streams, whether or not anybody reads.

    What is under way when patience ends is still there for a reader that comes later; what follows meanwhile is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # log messages come from several threads
        self._written: Future[None] | None = None

    def write(self, stream: TextIO, text: str) -> None:
        """Writes at once.

        Raises:
            OSError: it could not be written, or nobody took it.
        """
        with self._lock:
            patience = 0.0
            if self._written is None or self._written.done():
                self._written, patience = begin(stream, text), PATIENCE
            try:
                self._written.result(patience)
            except TimeoutError:
                raise TimeoutError(errno.ETIMEDOUT, "it is full, and nobody reads it") from None


def begin(stream: TextIO, text: str) -> Future[None]:
    """Writes without the stream's buffer, in a thread of its own: nothing else ends a write that waits.

    Returns:
        Is done when all is written; raises OSError if that could not be.
    """
    written: Future[None] = Future()
    written.set_running_or_notify_cancel()  # who waits may go away, but that ends no write

    def write() -> None:
        try:
            _write(stream, text)
        except Exception as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    try:
        threading.Thread(target=write, daemon=True).start()  # a daemon, so that the command ends all the same
    except RuntimeError:  # no more threads may be started
        write()
    return written


def _write(stream: TextIO, text: str) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # no real file
        stream.write(text)
        stream.flush()
        return
    data = text.encode(stream.encoding, stream.errors or "strict")
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # whoever shares the stream has made it so
            select.select((), (descriptor,), ())
