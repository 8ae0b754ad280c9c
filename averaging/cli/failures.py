"""How a command fails: in one line that says what to do, with an exit code, and never with a traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from averaging.errors import AveragingError

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes; a command that a signal ends early exits with `SIGNALLED` plus the signal's number."""


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


@contextmanager
def starting() -> Iterator[None]:
    """Turns a Ctrl+C that comes before the command takes care of signals itself into a `Failure`."""
    try:
        yield
    except KeyboardInterrupt:
        raise Failure("stopped by SIGINT before it began; nothing was written", SIGNALLED + signal.SIGINT) from None


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
