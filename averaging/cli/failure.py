"""How a command fails: with one line that says what to do, an exit code, and no traceback."""

from __future__ import annotations

import signal

import click

from averaging.common import ignored_proxies
from averaging.errors import AveragingError, ConfigError, JoinError, PeerUnreachableError, StateError, TensorError

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes. A command that a signal ends early exits with `SIGNALLED` plus the signal's number."""


class CommandError(click.ClickException):
    """Ends a command. Click prints the message to stderr and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = NOT_DONE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own are of the class


class Stopped(CommandError):  # noqa: N818 - no failure
    """A signal ended the command early; `when` follows its name in the message. A command that is done catches it."""

    def __init__(self, number: int, when: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{when}", SIGNALLED + number)
        self.number = number


def check_address() -> str:
    """The remedy where no connection came about. Proxies of the environment may be why, since they are not used."""
    return "; ".join(filter(None, ("check the address, and that a peer is up there", ignored_proxies())))


def failure_of(error: AveragingError) -> CommandError:
    """Converts an error of the library. The exit code is 2 if the user's arguments are wrong, else 1."""
    wrong_usage = isinstance(error, ConfigError | TensorError) or (isinstance(error, JoinError) and error.refused)
    unconnected = isinstance(error, PeerUnreachableError | StateError) and error.unconnected
    remedy = f"; {check_address()}" if unconnected else ""
    return CommandError(f"{error}{remedy}", WRONG_USAGE if wrong_usage else NOT_DONE)
