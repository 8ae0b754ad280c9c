"""How a command runs: what it prints, how it fails, and what signals do.

A command fails with one line that says what to do, an exit code, and no traceback. Ctrl+C, SIGTERM, SIGHUP and the
signals of a peer's `leave_on` end it gracefully, a second one at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import click

from averaging.common import ignored_proxies
from averaging.errors import AveragingError, ConfigError, JoinError, PeerUnreachableError, StateError, TensorError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
    from types import FrameType

T = TypeVar("T")

# Failures.

NOT_DONE, WRONG_USAGE, SIGNALLED = 1, 2, 128
"""Exit codes. A command that a signal ends early exits with `SIGNALLED` plus the signal's number."""


class CommandError(click.ClickException):
    """Ends a command. Click prints the message to stderr and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = NOT_DONE) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own are of the class


class InputError(CommandError):
    """The user's arguments, or a file that they name, cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, WRONG_USAGE)


class Stopped(CommandError):  # noqa: N818 - no failure
    """A signal ended the command early; `when` follows its name in the message. A command that is done catches it."""

    def __init__(self, number: int, when: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{when}", SIGNALLED + number)
        self.number = number


EXTRAS = {"dashboard": "dashboard", "feed": "rl", "rollouts": "rollouts", "serve": "serve"}  # of commands


def check_address() -> str:
    """The remedy where no connection came about. Proxies of the environment may be why, since they are not used."""
    return "; ".join(filter(None, ("check the address, and that a peer is up there", ignored_proxies())))


def failure_of(error: AveragingError | ModuleNotFoundError) -> CommandError:
    """Converts an error of the library. The exit code is 2 if the user's arguments are wrong, else 1."""
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get(click.get_current_context().info_name or "")
        remedy = f"pip install '.[{extra}]'" if extra else "pip install ."
        return InputError(f"{error.name} is not installed; run in the checkout: {remedy}")
    wrong_usage = isinstance(error, ConfigError | TensorError) or (isinstance(error, JoinError) and error.refused)
    unconnected = isinstance(error, PeerUnreachableError | StateError) and error.unconnected
    remedy = f"; {check_address()}" if unconnected else ""
    return CommandError(f"{error}{remedy}", WRONG_USAGE if wrong_usage else NOT_DONE)


# Output.

Item: TypeAlias = "tuple[Mapping[str, Any], str]"
"""An event, which becomes one JSON object, and the same as text for people."""

REFRESH_SECONDS = 0.25
CLEAR = "\r\x1b[K"  # clears the line of a terminal that says what the command waits for


def with_metrics(item: Item, endpoint: str) -> Item:
    event, text = item
    return ({**event, "metrics": endpoint}, f"{text}\nmetrics: http://{endpoint}/metrics") if endpoint else item


@contextmanager
def reporting(verbose: int, *, as_json: bool) -> Iterator[CommandOutput]:
    """The output of a command for its whole time, with the log on stderr and an event for its failure."""
    report = CommandOutput(as_json=as_json)
    with report.logging(verbose):
        try:
            yield report
        except (CommandError, AveragingError, ModuleNotFoundError) as error:
            failure = error if isinstance(error, CommandError) else failure_of(error)
            if as_json:
                report.emit({"event": "error", "message": failure.message}, "")
            raise failure from None  # click prints it to stderr


class CommandOutput:
    """Writes each item to stdout: as a JSON event if `as_json`, else as text."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._warned, self._waits = as_json, False, False

    @property
    def stdout_of_children(self) -> int | None:
        """Descriptor for the output of a child: stderr if stdout has events; None for this process's stdout."""
        return 2 if self._as_json else None

    def emit(self, event: Mapping[str, Any], text: str) -> None:
        """Writes one item at once. A full disk, or a reader that has gone away, does not stop the command."""
        self._write((json.dumps(event, allow_nan=False) if self._as_json else text) + "\n")

    def _write(self, text: str) -> None:
        try:
            if sys.stdout is not None:  # it was closed when the command was started
                sys.stdout.write(CLEAR + text if self._waits else text)
                sys.stdout.flush()
        except OSError as error:
            if not self._warned:
                self._warned = True
                closed = isinstance(error, BrokenPipeError)
                reason = "its reader has closed it" if closed else error.strerror
                remedy = "Ctrl+C ends it" if closed else "free space there"
                _warn(f"cannot write to stdout: {reason}; the command continues, {remedy}")

    def note(self, event: Mapping[str, Any], text: str) -> None:
        """Writes progress: as an event if `as_json`, else to stderr, unless -v logs it there."""
        if self._as_json:
            self.emit(event, "")
        elif not logging.getLogger("averaging").isEnabledFor(logging.INFO):
            self._make_way()
            _warn(text)

    def _make_way(self, _: object = None) -> bool:
        """Clears the line of `waiting`, so that a line can be written to stderr."""
        if self._waits:
            self._write("")
        return True

    @asynccontextmanager
    async def waiting(self, describe: Callable[[], str], *, line: bool = True) -> AsyncIterator[None]:
        """Shows what the command waits for: a line of a terminal that changes, else one `line`."""
        moves = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if self._as_json or not moves:
            if line and not self._as_json:
                self.emit({}, describe())
            yield
            return

        async def refresh() -> None:
            for sign in itertools.cycle("|/-\\"):
                self._write(f"{sign} {describe()}"[: shutil.get_terminal_size().columns - 1])
                await asyncio.sleep(REFRESH_SECONDS)

        self._waits = True
        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._write("")
            self._waits = False

    @contextmanager
    def logging(self, verbose: int) -> Iterator[None]:
        """Sends the library's log to stderr: from level WARNING, with `verbose` 1 INFO, with 2 DEBUG."""
        logger, handler = logging.getLogger("averaging"), logging.StreamHandler[IO[str]](sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(self._make_way)
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


# Signals.

DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The signals that end a command, with Python's default handlers."""


class Interrupted(KeyboardInterrupt):
    """Raised by a signal before the command has handlers of its own.

    It is a subclass, because a KeyboardInterrupt that has left an `exec`, such as those of dataclasses, makes
    `python -m` end by SIGINT regardless of the exit code.
    """


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def starting() -> Iterator[None]:
    """Converts a signal into `Stopped` while the command has no handlers of its own."""
    # SIGTERM needs a handler: the first process of a container ignores it by default.
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in DEFAULTS.items() if signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Stopped(interrupt.args[0] if isinstance(interrupt, Interrupted) else signal.SIGINT) from None
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])


class Stop:
    """The request of a signal to end the command.

    Attributes:
        number: number of the first signal; 0 before any.
        wait: callback of the first signal. If it returns True, the command will check `number` soon; else its task is
            cancelled. A second signal always cancels it.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.number = 0
        self.wait: Callable[[], bool] = lambda: False

    def request(self, number: int) -> None:
        again, self.number = bool(self.number), self.number or number
        if again or not self.wait():
            self._task.cancel()


def run(main: Callable[[Stop], Awaitable[T]], leave_on: Collection[str] = (), when: str = "") -> T:
    """Runs `main` on a new event loop. Signals, and those that `leave_on` names, cancel it, see `Stop`.

    Raises:
        Stopped: a signal cancelled it; `when` is what its message says then.
    """
    return asyncio.run(_run(main, leave_on, when))


async def _run(main: Callable[[Stop], Awaitable[T]], leave_on: Collection[str], when: str) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    further = {signal.Signals[name] for name in leave_on}
    stop, numbers = Stop(task), [*DEFAULTS, *sorted(further - DEFAULTS.keys() - {signal.SIGHUP})]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers if number != signal.SIGINT}
    for number in numbers:
        loop.add_signal_handler(number, stop.request, number)
    try:
        return await main(stop)
    except asyncio.CancelledError:
        if not stop.number:
            raise
        raise Stopped(stop.number, when) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        for number, handler in before.items():  # asyncio restores the default, which has another exit code
            signal.signal(number, handler)


class ServedUntilStopped(Protocol):
    async def wait(self) -> None: ...  # until the server ends, which it does only if it fails


def serve(report: CommandOutput, start: Callable[[AsyncExitStack], Awaitable[ServedUntilStopped]]) -> None:
    """Runs a server until a signal ends the command, which is no failure once the server is ready.

    Args:
        report: prints what happens.
        start: enters the server, and what it needs, says that it is ready, and returns it.

    Raises:
        CommandError: a signal came before.
    """
    ready = False

    async def main(_: Stop) -> None:
        nonlocal ready
        async with AsyncExitStack() as stack:
            server = await start(stack)
            ready = True
            await server.wait()

    try:
        run(main)
    except Stopped as stop:
        if not ready:
            raise CommandError("stopped during the start", stop.exit_code) from None
    report.emit({"event": "done"}, "stopped")
