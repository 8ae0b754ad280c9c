"""The open averagers of this process: how `close_all` closes them, and how they leave their runs on SIGTERM.

Job schedulers send SIGTERM before SIGKILL. Peers that end without leaving cost the others seconds in each round until
their records have expired.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Protocol, TypeAlias
from weakref import WeakSet

from averaging.errors import ConfigError

logger = logging.getLogger("averaging.training")


class OpenAverager(Protocol):
    """What this process asks of its averagers."""

    @property
    def run_id(self) -> str:
        """The id of its run."""
        ...

    @property
    def endpoint(self) -> str:
        """The address at which other peers join it."""
        ...

    def close(self) -> None:
        """Leaves its run and ends its thread."""
        ...

    def begin_to_leave(self) -> None:
        """Starts to leave its run on SIGTERM, without waiting."""
        ...

    def leave(self) -> None:
        """Leaves its run and waits until that is done."""
        ...


_open: WeakSet[OpenAverager] = WeakSet()


def note_open(averager: OpenAverager) -> None:
    """Notes an averager that `close_all` closes."""
    _open.add(averager)


def note_closed(averager: OpenAverager) -> None:
    """Undoes `note_open` and `leave_on_sigterm`. Further calls do nothing."""
    _open.discard(averager)
    _HANDLER.leavers.pop(averager, None)
    if not _HANDLER.leavers and threading.current_thread() is threading.main_thread():
        _HANDLER.uninstall()


def close_all() -> None:
    """Closes all averagers of this process, for a notebook in which no variable refers to them any more."""
    for averager in list(_open):
        averager.close()


def check_only_one(run_id: str, join: Collection[str]) -> None:
    """Refuses a second averager of a run in an interactive session, where a cell is often run again.

    The first one would continue in its thread, and could not be closed. A second one that joins the first is allowed.

    Raises:
        ConfigError: there is one; the message names it.
    """
    if not hasattr(sys, "ps1"):
        return
    for averager in list(_open):
        if averager.run_id == run_id and averager.endpoint not in join:
            raise ConfigError(
                f"this session has an open averager of run {run_id!r} at {averager.endpoint}; call its close() "
                f"first, or averaging.close_all()"
            )


Before: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class _Handler:
    """Handles SIGTERM for all leavers of the process, then calls the previous handler."""

    def __init__(self) -> None:
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
        elif signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            os.kill(os.getpid(), number)

    def install(self) -> None:
        """Installs itself, unless the signal is ignored or C code, which cannot be called from here, handles it."""
        before = signal.getsignal(signal.SIGTERM)
        if before not in (self, signal.SIG_IGN, None):
            self._before = before
            signal.signal(signal.SIGTERM, self)

    def uninstall(self) -> None:
        """Restores the previous handler, unless another handler was installed since, which may call this one."""
        is_installed = signal.getsignal(signal.SIGTERM) == self
        if is_installed:
            signal.signal(signal.SIGTERM, self._before)


_HANDLER = _Handler()


def leave_on_sigterm(leaver: OpenAverager) -> None:
    """Registers `leaver` to leave on SIGTERM. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    _HANDLER.leavers[leaver] = None
    _HANDLER.install()
