"""How a command fails: in one line that says what to do, with an exit code, and never with a traceback."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from averaging.errors import AveragingError

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes; a command that a signal ends early exits with `SIGNALLED` plus the signal's number."""

WITHOUT_REMEDY = frozenset(
    {"connection refused", "unknown host", "no answer to the connection", "no route to the host", "network unreachable"}
)
"""Reasons of the transport that do not say themselves what to do."""

CHECK_ADDRESS = "check the address, and that a peer is up there"


class Failure(click.ClickException):
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


class Interrupt:
    """What Ctrl+C does before the command takes care of signals itself.

    An exception may be lost in the middle of an import: callbacks and C code pass over it. So it is noted as well.

    Attributes:
        came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes the signal."""
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def starting() -> Iterator[None]:
    """Turns a Ctrl+C that comes while the command does not take care of signals itself into a `Failure`."""
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        # asyncio, which took care of signals, leaves Python's own handler behind.
        ended = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        what = "as it ended" if ended else "before it began; nothing was written"
        raise Failure(f"stopped by SIGINT {what}", SIGNALLED + signal.SIGINT) from None
    except ImportError:
        handler = signal.getsignal(signal.SIGINT)
        if not (isinstance(handler, Interrupt) and handler.came):
            raise
        # C code that is imported makes an error of its own of it.
        raise Failure("stopped by SIGINT before it began; nothing was written", SIGNALLED + signal.SIGINT) from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def write_line(line: str) -> str:
    """Writes to stdout; returns why that could not be done, as on a full disk, and nothing if it could."""
    try:
        click.echo(line)
    except BrokenPipeError:
        raise  # nobody reads on: click ends the command
    except OSError as error:
        return f"cannot write to stdout: {error.strerror}"
    return ""


def failure_of(error: AveragingError) -> Failure:
    """What an error of the library means on the command line: exit code 2 if the user's arguments are wrong, else 1."""
    from averaging.errors import ConfigError, TensorError

    wrong_usage = isinstance(error, ConfigError | TensorError)
    return Failure(_name_options(str(error)), WRONG_USAGE if wrong_usage else NOT_DONE)


def _name_options(message: str) -> str:
    """Writes the library's options as those of the command line: `group_size` as --group-size."""
    from averaging.config import option_names

    for ours, option in (("non_finite='allow'", "allow-non-finite"), ("insecure=True", "insecure"), ("`join`", "join")):
        message = message.replace(ours, f"--{option}")
    names = "|".join(sorted({name for name in option_names() if "_" in name} | {"advertise", "max_bytes"}))
    return re.sub(rf"`?\b({names})\b`?", lambda match: "--" + match.group(1).replace("_", "-"), message)
