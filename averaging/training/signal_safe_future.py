"""A future for threads in which signal handlers raise, such as the main thread on Ctrl+C."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class SignalSafeFuture(Generic[T]):
    """One thread sets it and others wait, even if a signal handler raises between any two of their instructions.

    `concurrent.futures` acquires its locks in Python code. An exception right after that leaves a lock held, and the
    thread that sets the result waits forever (https://bugs.python.org/issue29988). Here no thread holds a lock that
    another one needs.
    """

    def __init__(self) -> None:
        self._done = False
        self._value: T
        self._error: BaseException | None = None
        self._unset = threading.Lock()  # held until it is set; its methods, in C, acquire it or raise
        self._unset.acquire()

    def done(self) -> bool:
        """Whether it has been set."""
        return self._done

    def wait(self, seconds: float) -> None:
        """Waits until it is set; if several threads wait, it may take all of `seconds` although it was set earlier."""
        if not self._done:
            self._unset.acquire(timeout=seconds)

    def result(self) -> T:
        """The value that was set.

        Raises:
            BaseException: the exception that was set.
        """
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # avoids a reference cycle of the error and its frame

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
