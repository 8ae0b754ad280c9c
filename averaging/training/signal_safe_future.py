"""A result that a thread waits for in which signals raise exceptions, as Ctrl+C does in the main thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class SignalSafeFuture(Generic[T]):
    """Set by one thread and waited for by others, whatever is raised in these, and between whichever instructions.

    The locks of `concurrent.futures` are taken in Python code: an exception that comes right behind that leaves them
    taken for ever, and the thread that sets the result waits for ever (https://bugs.python.org/issue29988). Here
    nothing is held that the other side needs.
    """

    def __init__(self) -> None:
        self._done = False
        self._value: T
        self._error: BaseException | None = None
        self._unset = threading.Lock()  # held until it is set; its methods are in C, and take it or raise
        self._unset.acquire()

    def done(self) -> bool:
        """Whether it has been set."""
        return self._done

    def wait(self, seconds: float) -> None:
        """Returns when it is set; perhaps only after so many seconds, if several threads wait or have waited."""
        if not self._done:
            self._unset.acquire(timeout=seconds)

    def result(self) -> T:
        """What was set.

        Raises:
            BaseException: the exception that was set.
        """
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # else the error would hold the frame that holds the error

    def set_result(self, value: T) -> None:
        """Sets it, once."""
        self._value = value
        self._set()

    def set_exception(self, error: BaseException) -> None:
        """Sets what `result` raises, once."""
        self._error = error
        self._set()

    def _set(self) -> None:
        self._done = True
        self._unset.release()
