"""The output of a command: JSON lines, or text lines with a spinner on a terminal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import shlex
import sys
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import IO, TYPE_CHECKING, TextIO, cast

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.spinner import Spinner
from rich.text import Text

from averaging.cli import json_events
from averaging.cli.error_reporting import CommandError
from averaging.common import CLIENT_PREFIX, duration, is_loopback, listed, parse_address
from averaging.common import counted as counted
from averaging.common import size as size
from averaging.errors import printable as printable
from averaging.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from averaging.discovery.gossip import Waiting
    from averaging.tensors import Schema

# The texts that commands print. Pure.


def round_name(number: int, rounds: int | None) -> str:
    """Returns for example `round 1 of 3`; `number` counts from 1."""
    return f"round {number}" + (f" of {rounds}" if rounds and number <= rounds else "")


def joining(waiting: Waiting) -> str:
    """The peer still waits for an answer from one of --join."""
    return f"joining: {printable(str(waiting))}; --join-timeout limits this"


def ready(endpoint: str, run_id: str, schema: Schema, join_command: Sequence[str], kept: Sequence[str] = ()) -> str:
    """The peer is up; how other peers join it."""
    first = (
        f"{endpoint} is up in run {printable(run_id)}: "
        f"{counted(len(schema.tensors), 'tensor')}, {size(schema.nbytes)}, schema {schema.hash.hex()[:8]}"
    )
    if kept:
        first += f"\nnot averaged, but kept as they are: {listed(kept)}"
    if endpoint.startswith(CLIENT_PREFIX):
        return f"{first}\nother peers cannot join through it: it is a client"
    if is_loopback(parse_address(endpoint)[0]):
        where = "in another terminal of this machine (for other machines, --listen on an address that they can reach)"
    else:
        where = "with --listen on an address that other peers can reach, or with --mode client"
    return f"{first}\njoin it {where}:\n  {shlex.join(join_command)}"


def looking(name: str, known: int) -> str:
    """The peer looks for a group; `known` is the number of other peers in discovery."""
    return f"{name}: looking for a group, {known} other {'peer' if known == 1 else 'peers'} seen"


def averaged(name: str, endpoint: str, receipt: Receipt, gathered: Mapping[str, object]) -> str:
    """A round averaged."""
    others = listed([printable(member) for member in receipt.members if member != endpoint])
    lines = [
        f"{name}: averaged with {others} in {duration(receipt.seconds)} "
        f"(all-reduce {duration(receipt.allreduce_seconds)}, {size(receipt.bytes_sent)} sent, "
        f"{size(receipt.bytes_received)} received)"
    ]
    lines += [f"  {printable(who)} sent {printable(str(data))}" for who, data in gathered.items() if data is not None]
    lines += [f"  lost {printable(dropped.endpoint)}: {printable(dropped.reason)}" for dropped in receipt.dropped]
    if receipt.kept_local:
        lines.append(f"  {counted(receipt.kept_local, 'element')} kept the local value, because their reducer was lost")
    return "\n".join(lines)


def not_averaged(name: str, receipt: Receipt) -> str:
    """A round did not average."""
    reason = printable(receipt.reason)
    if receipt.outcome is Outcome.NO_GROUP:
        return f"{name}: no group within {receipt.seconds:.1f} s: {reason}"
    return f"{name}: failed after {receipt.seconds:.1f} s: {reason}"


def finished(rounds: int, output: str | None, why_not: str) -> str:
    """The last line of the output."""
    return f"done: {counted(rounds, 'round')}, " + (f"wrote {output}" if output else f"nothing written: {why_not}")


# Output that never blocks the event loop, even if a pipe is full or a terminal is stopped.


TIMEOUT = 1.0
"""Seconds to wait for a slow reader."""


class NonblockingOutput:
    """Writes to one of the standard streams with a timeout.

    A write that has timed out continues in the background. Until it is done, further text is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # log messages come from several threads
        self._written: Future[None] | None = None

    def write(self, stream: TextIO, text: str) -> None:
        """Writes the text.

        Raises:
            OSError: the write failed or timed out.
        """
        with self._lock:
            timeout = 0.0
            if self._written is None or self._written.done():
                self._written, timeout = begin(stream, text), TIMEOUT
            try:
                self._written.result(timeout)
            except TimeoutError:
                raise TimeoutError(errno.ETIMEDOUT, "it is full and is not read") from None


def begin(stream: TextIO, text: str) -> Future[None]:
    """Begins an unbuffered write in a thread of its own, because a blocked write cannot be interrupted.

    Returns:
        A future that is done when all is written, or raises the OSError.
    """
    written: Future[None] = Future()
    written.set_running_or_notify_cancel()  # a cancelled wait must not cancel the write

    def write() -> None:
        try:
            _write(stream, text)
        except Exception as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    try:
        threading.Thread(target=write, daemon=True).start()  # a daemon, so that the command can end
    except RuntimeError:  # no more threads can be started
        write()
    return written


def _write(stream: TextIO, text: str) -> None:
    try:
        descriptor = stream.fileno()
    except OSError:  # not a real file
        stream.write(text)
        stream.flush()
        return
    data = text.encode(stream.encoding, stream.errors or "strict")
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process that shares the stream has made it non-blocking
            select.select((), (descriptor,), ())


REFRESH_SECONDS = 0.25
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class CommandOutput:
    """Writes each item to stdout: as a JSON event if `as_json`, else as text."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stderr = _Stderr()
        self._stdout = cast(IO[str], _Stdout(self._stderr))
        # Lines are meant to be copied, so they are not wrapped or highlighted.
        self._console = Console(file=self._stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @property
    def stdout_of_children(self) -> int | None:
        """Descriptor for the output of a child: stderr if stdout has events; None for this process's stdout."""
        return 2 if self._as_json else None

    def emit(self, event: json_events.Event, text: str) -> None:
        """Writes one item at once. A full disk or pipe, or a closed terminal, does not stop the command."""
        if self._as_json:
            click.echo(json_events.dumps(event), file=self._stdout)
        else:
            self._console.print(text)

    def note(self, event: json_events.Event, text: str) -> None:
        """Writes progress: as an event if `as_json`, else to stderr, unless -v logs it there."""
        if self._as_json:
            self.emit(event, "")
        elif not logging.getLogger("averaging").isEnabledFor(logging.INFO):
            self._stderr.write_line(text)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Writes an error event if `as_json`. In any case click prints the error to stderr."""
        try:
            yield
        except CommandError as failure:
            if self._as_json:
                self.emit(json_events.error(failure.message), "")
            raise

    @asynccontextmanager
    async def waiting(self, describe: Callable[[], str]) -> AsyncIterator[None]:
        """Shows what the command waits for: a spinner with updates on a terminal, else one line."""
        if self._as_json or not self._console.is_terminal or self._console.is_dumb_terminal:
            if not self._as_json:
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
    def transfer(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a callback for the received and the total bytes, which a terminal shows as a progress bar."""
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
        """Sends the library's log to stderr: from level WARNING, with `verbose` 1 INFO, with 2 DEBUG."""
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


def _reason(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "its reader has closed it; the command continues, Ctrl+C ends it"
    return f"{error.strerror}; the command continues. Free space there"


class _Stdout:
    """Standard output whose errors do not end the command, also inside rich. The first error is printed to stderr."""

    def __init__(self, stderr: _Stderr) -> None:
        self._outlet = NonblockingOutput()
        self._stderr = stderr
        self._warned = False

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        """Writes the text if possible."""
        try:
            if sys.stdout is not None:  # it was closed when the command was started
                self._outlet.write(sys.stdout, text)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._stderr.write_line(f"cannot write to stdout: {_reason(error)}")
        return len(text)

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""


class _Stderr:
    """Standard error whose errors are ignored."""

    def __init__(self) -> None:
        self._outlet = NonblockingOutput()

    def write_line(self, line: str) -> None:
        """Writes a line if possible."""
        try:
            if sys.stderr is not None:
                self._outlet.write(sys.stderr, f"{line}\n")
        except OSError:
            return


class _StderrHandler(logging.Handler):
    """Logs to stderr, or through the console if it is a terminal, so that a spinner is not overwritten."""

    def __init__(self, console: Console, stderr: _Stderr) -> None:
        super().__init__()
        self._console, self._stderr = console, stderr

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self._console.is_terminal and sys.stderr.isatty():
            self._console.print(line)
        else:
            self._stderr.write_line(line)
