"""How a command fails: in one line that says what to do, with an exit code, and never with a traceback."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from averaging.errors import AveragingError

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes; a command that a signal ends early exits with `SIGNALLED` plus the signal's number."""

WITHOUT_REMEDY = frozenset(
    {"connection refused", "unknown host", "no answer to the connection", "no route to the host", "network unreachable"}
)
"""Reasons of the transport that do not say themselves what to do."""

BEFORE = " before it began; nothing was written"

CHECK_ADDRESS = "check the address, and that a peer is up there"


class CommandError(click.ClickException):
    """Ends a command: click prints the message to stderr and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = NOT_DONE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own are of the class


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal ended the command in order.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupted(KeyboardInterrupt):
    """Is raised by a signal.

    Not KeyboardInterrupt itself: when that has left an `exec`, as those of dataclasses, `python -m` ends by SIGINT
    whatever the exit code.
    """


class Interrupt:
    """What SIGINT and SIGTERM do before the command takes care of signals itself.

    An exception may be lost in the middle of an import: callbacks and C code pass over it. So it is noted as well.
    SIGTERM is taken, too, since it would do nothing to the first process of a container, which has no default for it.

    Attributes:
        number: of the signal that came; 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes the signal."""
        self.number = number
        raise Interrupted


DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The signals that end a command, and what they do in a Python that nobody has told anything else."""


def interrupted() -> int:
    """The number of a signal that has come while the command did not take care of signals itself, or else 0."""
    handlers = [signal.getsignal(number) for number in DEFAULTS]
    return next((handler.number for handler in handlers if isinstance(handler, Interrupt)), 0)


@contextmanager
def starting() -> Iterator[None]:
    """Turns a signal that comes while the command does not take care of signals itself into a `CommandError`."""
    interrupt, ours = Interrupt(), []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in DEFAULTS.items() if signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        # asyncio, which took care of signals, leaves Python's own handler behind.
        ended = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise stopped(interrupted() or signal.SIGINT, " as it ended" if ended else BEFORE) from None
    except ImportError:
        if not (came := interrupted()):
            raise
        # C code that is imported makes an error of its own of it.
        raise stopped(came, BEFORE) from None
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])


def stopped(number: int, when: str) -> CommandError:
    """The end of a command that a signal ended early."""
    return CommandError(f"stopped by {signal.Signals(number).name}{when}", SIGNALLED + number)


def write_line(line: str) -> str:
    """Writes to stdout; returns why that could not be done, as on a full disk, and nothing if it could."""
    try:
        click.echo(line)
    except BrokenPipeError:
        raise  # nobody reads on: click ends the command
    except OSError as error:
        return f"cannot write to stdout: {error.strerror}"
    return ""


def failure_of(error: AveragingError) -> CommandError:
    """What an error of the library means on the command line: exit code 2 if the user's arguments are wrong, else 1."""
    from averaging.errors import ConfigError, JoinRefusedError, TensorError

    wrong_usage = isinstance(error, ConfigError | TensorError | JoinRefusedError)
    return CommandError(name_options(str(error)), WRONG_USAGE if wrong_usage else NOT_DONE)


def name_options(message: str) -> str:
    """Writes the library's options as those of the command line: `group_size` as --group-size."""
    from averaging.config import option_names

    for ours, option in (("non_finite='allow'", "allow-non-finite"), ("insecure=True", "insecure"), ("`join`", "join")):
        message = message.replace(ours, f"--{option}")
    names = "|".join(sorted({name for name in option_names() if "_" in name} | {"advertise", "max_bytes"}))
    return re.sub(rf"`?\b({names})\b`?", lambda match: "--" + match.group(1).replace("_", "-"), message)
