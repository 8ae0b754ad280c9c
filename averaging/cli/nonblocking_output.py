"""Output that never blocks the event loop, even if a pipe is full or a terminal is stopped."""

from __future__ import annotations

import errno
import os
import select
import threading
from concurrent.futures import Future
from typing import TextIO

TIMEOUT = 1.0
"""Seconds to wait for a slow reader."""


class NonblockingOutput:
    """Writes to one of the standard streams with a timeout.

    A write that has timed out continues in the background. Until it is done, further text is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # log messages come from several threads
        self._written: Future[None] | None = None

    def write(self, stream: TextIO, text: str) -> None:
        """Writes the text.

        Raises:
            OSError: the write failed or timed out.
        """
        with self._lock:
            timeout = 0.0
            if self._written is None or self._written.done():
                self._written, timeout = begin(stream, text), TIMEOUT
            try:
                self._written.result(timeout)
            except TimeoutError:
                raise TimeoutError(errno.ETIMEDOUT, "it is full and is not read") from None


def begin(stream: TextIO, text: str) -> Future[None]:
    """Begins an unbuffered write in a thread of its own, because a blocked write cannot be interrupted.

    Returns:
        A future that is done when all is written, or raises the OSError.
    """
    written: Future[None] = Future()
    written.set_running_or_notify_cancel()  # a cancelled wait must not cancel the write

    def write() -> None:
        try:
            _write(stream, text)
        except Exception as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    try:
        threading.Thread(target=write, daemon=True).start()  # a daemon, so that the command can end
    except RuntimeError:  # no more threads can be started
        write()
    return written


def _write(stream: TextIO, text: str) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # not a real file
        stream.write(text)
        stream.flush()
        return
    data = text.encode(stream.encoding, stream.errors or "strict")
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process that shares the stream has made it non-blocking
            select.select((), (descriptor,), ())
