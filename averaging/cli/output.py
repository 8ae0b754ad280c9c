"""The output of a command: JSON lines, or text lines with a spinner on a terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

import click
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from averaging.cli.failure import CommandError, failure_of
from averaging.errors import AveragingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

REFRESH_SECONDS = 0.25
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def reporting(verbose: int, *, as_json: bool) -> Iterator[CommandOutput]:
    """The output of a command for its whole time, with the log on stderr and errors as events."""
    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        yield report


class CommandOutput:
    """Writes each item to stdout: as a JSON event if `as_json`, else as text."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stdout = cast(IO[str], _Stdout())
        # Lines are meant to be copied, so they are not wrapped or highlighted.
        self._console = Console(file=self._stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @property
    def stdout_of_children(self) -> int | None:
        """Descriptor for the output of a child: stderr if stdout has events; None for this process's stdout."""
        return 2 if self._as_json else None

    def emit(self, event: Mapping[str, Any], text: str) -> None:
        """Writes one item at once. A full disk, or a reader that has gone away, does not stop the command."""
        if self._as_json:
            self._stdout.write(json.dumps(event, allow_nan=False) + "\n")
        else:
            self._console.print(text)

    def note(self, event: Mapping[str, Any], text: str) -> None:
        """Writes progress: as an event if `as_json`, else to stderr, unless -v logs it there."""
        if self._as_json:
            self.emit(event, "")
        elif not logging.getLogger("averaging").isEnabledFor(logging.INFO):
            _warn(text)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Writes an error event if `as_json`. In any case click prints the error to stderr."""
        try:
            yield
        except (CommandError, AveragingError) as error:
            failure = error if isinstance(error, CommandError) else failure_of(error)
            if self._as_json:
                self.emit({"event": "error", "message": failure.message}, "")
            raise failure from None

    @asynccontextmanager
    async def waiting(self, describe: Callable[[], str], *, line: bool = True) -> AsyncIterator[None]:
        """Shows what the command waits for: a spinner with updates on a terminal, else one `line`."""
        if self._as_json or not self._console.is_terminal or self._console.is_dumb_terminal:
            if line and not self._as_json:
                self.emit({}, describe())
            yield
            return
        spinner = Spinner("dots" if self._console.encoding.startswith("utf") else "line", Text(describe()))

        async def refresh() -> None:
            while True:
                spinner.update(text=Text(describe()))
                await asyncio.sleep(REFRESH_SECONDS)

        with Live(spinner, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False):
            task = asyncio.create_task(refresh())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait({task})

    @contextmanager
    def logging(self, verbose: int) -> Iterator[None]:
        """Sends the library's log to stderr: from level WARNING, with `verbose` 1 INFO, with 2 DEBUG."""
        logger, handler = logging.getLogger("averaging"), _LogHandler(self._console)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        before = logger.level
        logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


def _warn(text: str) -> None:
    with suppress(OSError):
        click.echo(text, err=True)


class _Stdout:
    """Standard output whose errors do not end the command, also inside rich. The first error is printed to stderr."""

    def __init__(self) -> None:
        self._warned = False

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        try:
            if sys.stdout is not None:  # it was closed when the command was started
                sys.stdout.write(text)
                sys.stdout.flush()
        except OSError as error:
            if not self._warned:
                self._warned = True
                closed = isinstance(error, BrokenPipeError)
                reason = "its reader has closed it" if closed else error.strerror
                remedy = "Ctrl+C ends it" if closed else "free space there"
                _warn(f"cannot write to stdout: {reason}; the command continues, {remedy}")
        return len(text)

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""


class _LogHandler(logging.StreamHandler[IO[str]]):
    """Logs to stderr, or through the console if it is a terminal, so that a spinner is not overwritten."""

    def __init__(self, console: Console) -> None:
        super().__init__(sys.stderr)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if self._console.is_terminal and sys.stderr.isatty():
            self._console.print(self.format(record))
        else:
            super().emit(record)
