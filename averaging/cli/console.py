"""Where a command's news go: JSON lines for programs, or lines for people with a spinner on a terminal."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import IO, cast

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.spinner import Spinner
from rich.text import Text

from averaging.cli import json_events
from averaging.cli.error_reporting import CommandError
from averaging.cli.nonblocking_output import NonblockingOutput

REFRESH_SECONDS = 0.25
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class CommandOutput:
    """Tells everything once, on stdout: as an event if `as_json`, else in words."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stderr = _Stderr()
        self._stdout = cast(IO[str], _Stdout(self._stderr))
        # Lines are for copying: never wrapped, never coloured by guesses about their content.
        self._console = Console(file=self._stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def tell(self, event: json_events.Event, words: str) -> None:
        """Tells one thing, at once. A stdout that is a full disk or pipe, or a closed terminal, stops nothing."""
        if self._as_json:
            click.echo(json_events.dumps(event), file=self._stdout)
        else:
            self._console.print(words)

    def note(self, event: json_events.Event, words: str) -> None:
        """Tells what is no result: as an event if `as_json`, else on stderr unless -v has the log there."""
        if self._as_json:
            self.tell(event, "")
        elif not logging.getLogger("averaging").isEnabledFor(logging.INFO):
            self._stderr.tell(words)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Tells programs why the command ends; click tells people, on stderr."""
        try:
            yield
        except CommandError as failure:
            if self._as_json:
                self.tell(json_events.error(failure.message), "")
            raise

    @asynccontextmanager
    async def waiting(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """Shows what is being waited for: on a terminal with a spinner, kept up to date, elsewhere once."""
        if self._as_json or not self._console.is_terminal or self._console.is_dumb_terminal:
            if not self._as_json:
                self.tell({}, describe())
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
    def transfer(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yields what is to be told how many bytes are there, and of how many; a terminal shows it as a bar."""
        if self._as_json or not self._console.is_terminal:
            yield lambda received, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        progress = Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        with progress:
            task = progress.add_task(what, total=None)
            yield lambda received, total: progress.update(task, completed=received, total=total)

    @contextmanager
    def logging(self, verbose: int) -> Iterator[None]:
        """Sends the library's log to stderr: warnings, with `verbose` 1 what happens, with 2 everything."""
        logger, handler = logging.getLogger("averaging"), _StderrHandler(self._console, self._stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        before = logger.level
        logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


def _why(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "nobody reads it any more; the command goes on, Ctrl+C ends it"
    return f"{error.strerror}; the command goes on. Make room there"


class _Stdout:
    """Standard output whose failures end nothing, also where rich's spinners write to it; the first one is told."""

    def __init__(self, stderr: _Stderr) -> None:
        self._outlet = NonblockingOutput()
        self._stderr = stderr
        self._warned = False

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """Takes the text, whether or not it can be written."""
        try:
            if sys.stdout is not None:  # closed by whoever started the command
                self._outlet.write(sys.stdout, text)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._stderr.tell(f"cannot write to stdout: {_why(error)}")
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


class _Stderr:
    """Standard error; if that cannot be written either, the work is more than the word."""

    def __init__(self) -> None:
        self._outlet = NonblockingOutput()

    def tell(self, line: str) -> None:
        """Writes a line, if that can be done."""
        try:
            if sys.stderr is not None:
                self._outlet.write(sys.stderr, f"{line}\n")
        except OSError:
            return


class _StderrHandler(logging.Handler):
    """Writes to stderr; through the console if both are one terminal, so that a spinner is not written over."""

    def __init__(self, console: Console, stderr: _Stderr) -> None:
        super().__init__()
        self._console, self._stderr = console, stderr

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self._console.is_terminal and sys.stderr.isatty():
            self._console.print(line)
        else:
            self._stderr.tell(line)
