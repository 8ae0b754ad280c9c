"""Errors of commands: one line that says what to do, an exit code, and no traceback."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from averaging.errors import AveragingError

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes. A command that a signal ends early exits with `SIGNALLED` plus the signal's number."""

BEFORE = " before it began; nothing was written"

CHECK_ADDRESS = "check the address, and that a peer is up there"


class CommandError(click.ClickException):
    """Ends a command. Click prints the message to stderr and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = NOT_DONE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own are of the class


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the command gracefully.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupted(KeyboardInterrupt):
    """Raised by a signal.

    It is a subclass, because a KeyboardInterrupt that has left an `exec`, such as those of dataclasses, makes
    `python -m` end by SIGINT regardless of the exit code.
    """


class Interrupt:
    """The handler of SIGINT and SIGTERM before the command installs its own handlers.

    The number is also stored, because callbacks and C code may swallow an exception during an import. SIGTERM needs a
    handler because the first process of a container ignores it by default.

    Attributes:
        number: number of the signal; 0 before any.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        self.number = number
        raise Interrupted


DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The signals that end a command, with Python's default handlers."""


def interrupted() -> int:
    """Returns the number of a signal that `Interrupt` has handled, else 0."""
    handlers = [signal.getsignal(number) for number in DEFAULTS]
    return next((handler.number for handler in handlers if isinstance(handler, Interrupt)), 0)


@contextmanager
def starting() -> Iterator[None]:
    """Converts a signal into a `CommandError` while the command has no handlers of its own."""
    interrupt, ours = Interrupt(), []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in DEFAULTS.items() if signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        # If the event loop handled signals before, asyncio has restored Python's default handler.
        ended = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise stopped(interrupted() or signal.SIGINT, " as it ended" if ended else BEFORE) from None
    except ImportError:
        if not (came := interrupted()):
            raise
        # Imported C code converts the exception into an ImportError.
        raise stopped(came, BEFORE) from None
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])


def stopped(number: int, when: str) -> CommandError:
    """Returns the error of a command that a signal ended early."""
    return CommandError(f"stopped by {signal.Signals(number).name}{when}", SIGNALLED + number)


def write_line(line: str) -> str:
    """Writes a line to stdout. Returns the reason if that fails, as on a full disk, else an empty string."""
    try:
        click.echo(line)
    except BrokenPipeError:
        raise  # the reader has closed it; click ends the command
    except OSError as error:
        return f"cannot write to stdout: {error.strerror}"
    return ""


def failure_of(error: AveragingError) -> CommandError:
    """Converts an error of the library. The exit code is 2 if the user's arguments are wrong, else 1."""
    from averaging.errors import ConfigError, JoinError, TensorError

    wrong_usage = isinstance(error, ConfigError | TensorError) or (isinstance(error, JoinError) and error.refused)
    return CommandError(str(error), WRONG_USAGE if wrong_usage else NOT_DONE)
