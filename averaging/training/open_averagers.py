"""The open averagers of this process: how `close_all` closes them, and how they leave their runs on signals.

Job schedulers send SIGTERM before SIGKILL, and Slurm SIGUSR1 some time before its limit. Peers that end without leaving
cost the others seconds in each round until their records have expired.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeAlias
from weakref import WeakSet

from averaging.errors import ClosedError, ConfigError
from averaging.peer import Peer

logger = logging.getLogger("averaging.training")


class OpenAverager(Protocol):
    @property
    def run_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...

    def close(self) -> None: ...
    def begin_to_leave(self) -> None: ...  # on a signal, without waiting
    def leave(self) -> None: ...  # waits until it has left


_open: WeakSet[OpenAverager] = WeakSet()


def note_open(averager: OpenAverager) -> None:
    _open.add(averager)


def note_closed(averager: OpenAverager) -> None:
    """Undoes `note_open` and `leave_on_signals`. Further calls do nothing."""
    _open.discard(averager)
    for handler in _HANDLERS.values():
        handler.leavers.pop(averager, None)
        if not handler.leavers and threading.current_thread() is threading.main_thread():
            handler.uninstall()


def close_all() -> None:
    """Closes all averagers of this process, for a notebook in which no variable refers to them any more."""
    for averager in list(_open):
        averager.close()


def check_only_one(run_id: str, join: Collection[str]) -> None:
    """Refuses a second averager of a run in this process that would take over the weights of the first one.

    It is meant if it joins another one of this process: that is a second peer of the same model. One that joins nobody
    takes over nothing; in an interactive session, where a cell is often run again, it is refused all the same.

    Raises:
        ConfigError: there is one; the message names it.
    """
    others = []
    for averager in list(_open):
        with suppress(ClosedError):  # its thread has failed
            others += [averager.endpoint] * (averager.run_id == run_id)
    if others and not set(others) & set(join) and (join or hasattr(sys, "ps1")):
        raise ConfigError(
            f"this process has an open averager of run {run_id!r} at {others[0]}, whose weights another one of the run "
            f"would take over. Give each part of a model a run id of its own, such as {run_id + '-head'!r}. In a "
            f"notebook call the first one's close(), or averaging.close_all(). A second peer of the same model joins "
            f"the first: join=[{others[0]!r}]"
        )


Before: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class _Handler:
    """Handles one signal for all its leavers in the process, then calls the previous handler."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self.leavers: dict[OpenAverager, None] = {}  # ordered
        self._before: Before = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        leavers = list(self.leavers)
        for leaver in leavers:
            _open.discard(leaver)
            leaver.begin_to_leave()
        for leaver in leavers:
            leaver.leave()
        before = self._before
        self.uninstall()
        if callable(before):
            before(number, frame)
        elif signal.getsignal(number) == signal.SIG_DFL:
            os.kill(os.getpid(), number)
            if os.getpid() == 1:  # the first process of a container, for which there are no defaults
                raise SystemExit(128 + number)

    def install(self) -> None:
        """Installs itself, unless the signal is ignored or C code, which cannot be called from here, handles it."""
        before = signal.getsignal(self._number)
        if before not in (self, signal.SIG_IGN, None):
            self._before = before
            signal.signal(self._number, self)

    def uninstall(self) -> None:
        """Restores the previous handler, unless another handler was installed since, which may call this one."""
        is_installed = signal.getsignal(self._number) == self
        if is_installed:
            signal.signal(self._number, self._before)


_HANDLERS: dict[str, _Handler] = {}
"""The handlers of this process, by the name of the signal."""


def _forget() -> None:
    # The averagers are the parent's: a forked child that is terminated ends like any other process.
    _open.clear()
    for handler in _HANDLERS.values():
        handler.leavers.clear()
        handler.uninstall()
    _HANDLERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def leave_on_signals(leaver: OpenAverager, names: Collection[str]) -> None:
    """Registers `leaver` to leave on these signals, such as SIGTERM. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in names:
        handler = _HANDLERS.setdefault(name, _Handler(signal.Signals[name]))
        handler.leavers[leaver] = None
        handler.install()


# How the process ends when the owner of its peer has asked it to leave.


@asynccontextmanager
async def ending_process(peer: Peer) -> AsyncIterator[None]:
    """Enters the peer, and ends this process after the peer has left if its owner has asked for that."""
    async with peer:
        yield
    if peer.leaves:
        os.kill(_process_to_end(), signal.SIGTERM)


def _process_to_end() -> int:
    """This process, or the agent of torchrun that has started it and would start it again."""
    process = os.getppid()
    if ELASTIC not in os.environ or process != PARENT:
        return os.getpid()
    while f"{ELASTIC}=".encode() in _environment_of(process):
        process = _parent_of(process)
    return process


ELASTIC = "TORCHELASTIC_RUN_ID"
"""The variable that torchrun sets for its workers, and that their children inherit."""

PARENT = os.getppid()
"""The process that has started this one, which may have ended since."""


def _environment_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def _parent_of(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
