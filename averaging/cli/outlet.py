"""Writing where nobody may read: a full pipe or a terminal that is stopped holds up no peer, and no signal to it."""

from __future__ import annotations

import errno
import os
import select
import threading
from typing import TextIO

PATIENCE = 1.0
"""Seconds for which a reader that lags behind is waited for."""


class Outlet:
    """Writes to one of the standard streams, each text in a thread of its own: nothing else ends a write that waits.

    What is under way when patience ends is still there for a reader that comes later; what follows meanwhile is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # log messages come from several threads
        self._thread = threading.Thread()
        self._error: OSError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether somebody has yet to read what was written last."""
        return self._thread.is_alive()

    def write(self, stream: TextIO, text: str) -> None:
        """Writes at once, without the stream's buffer.

        Raises:
            OSError: it could not be written, or nobody took it.
        """
        try:
            descriptor = stream.fileno()
        except OSError:  # no real file, so nobody to wait for
            stream.write(text)
            stream.flush()
            return
        with self._lock:
            if not self._thread.is_alive():
                data, self._error = text.encode(stream.encoding, stream.errors or "strict"), None
                # A daemon, so that the command ends all the same.
                self._thread = threading.Thread(target=self._write, args=(descriptor, data), daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads may be started
                    self._write(descriptor, data)
                else:
                    self._thread.join(PATIENCE)
            if self._thread.is_alive():
                raise TimeoutError(errno.ETIMEDOUT, "it is full, and nobody reads it")
            if self._error is not None:
                raise self._error

    def _write(self, descriptor: int, data: bytes) -> None:
        try:
            while data:
                try:
                    data = data[os.write(descriptor, data) :]
                except BlockingIOError:  # whoever shares the stream has made it so
                    select.select((), (descriptor,), ())
        except OSError as error:
            self._error = error
