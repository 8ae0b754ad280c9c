"""A command in a pseudo-terminal, and what a terminal with these lines and columns would show of it."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

import pyte

from tests.support.processes import DEADLINE


class TerminalProcess:
    """`python -m averaging …` in a terminal. Use it as a context manager: at the end it is killed if it still runs.

    Args:
        arguments: after `averaging`.
        columns, lines: size of the terminal.
    """

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:  # the child only executes
            try:
                environment = dict(os.environ, TERM="xterm-256color", COLUMNS="", LINES="")
                for name in ("COLUMNS", "LINES", "NO_COLOR"):
                    environment.pop(name, None)
                os.execve(sys.executable, [sys.executable, "-m", "averaging", *arguments], environment)
            finally:
                os._exit(127)
        self._set_size(columns, lines)
        self.code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)

    @property
    def text(self) -> str:
        """All lines of the screen."""
        return "\n".join(self.screen.display)

    def until(self, condition: Callable[[list[str]], object], timeout: float = DEADLINE) -> list[str]:
        """Reads until the lines of the screen fulfil `condition`; returns them."""
        end = time.monotonic() + timeout
        while not condition(self.screen.display):
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"not on the screen after {timeout:g} s, or the command has ended:\n{self.text}")
        return list(self.screen.display)

    def until_text(self, text: str) -> list[str]:
        """Reads until some line contains `text`."""
        return self.until(lambda lines: any(text in line for line in lines))

    def press(self, keys: str) -> None:
        """Sends keys."""
        os.write(self._terminal, keys.encode())

    def wait(self) -> int:
        """Reads until the command has ended; returns its exit code."""
        end = time.monotonic() + DEADLINE
        while self._read(end - time.monotonic()):
            pass
        ended, status = os.waitpid(self.pid, os.WNOHANG if time.monotonic() >= end else 0)
        if not ended:
            raise AssertionError(f"the command goes on:\n{self.text}")
        self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self, timeout: float) -> bool:
        """Reads what there is. Returns whether there can be more."""
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, timeout))
        if not ready:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # all processes have closed it
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)
