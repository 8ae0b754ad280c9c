"""Makes the peers of this process leave their runs in order on SIGTERM, which job schedulers send before SIGKILL.

Peers that end without leaving cost the others seconds in each round until their records have expired.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol, TypeAlias

logger = logging.getLogger("averaging.training")


class LeavesOnSigterm(Protocol):
    """An object that leaves its run on SIGTERM."""

    def begin_to_leave(self) -> None:
        """Starts to leave its run without waiting."""
        ...

    def leave(self) -> None:
        """Leaves its run and waits until that is done."""
        ...


Before: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class _Handler:
    """Handles SIGTERM for all leavers of the process, then calls the previous handler."""

    def __init__(self) -> None:
        self.leavers: dict[LeavesOnSigterm, None] = {}  # ordered
        self._before: Before = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        leavers = list(self.leavers)
        for leaver in leavers:
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


def leave_on_sigterm(leaver: LeavesOnSigterm) -> None:
    """Registers `leaver` to leave on SIGTERM. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    _HANDLER.leavers[leaver] = None
    _HANDLER.install()


def stay_on_sigterm(leaver: LeavesOnSigterm) -> None:
    """Undoes `leave_on_sigterm`. Further calls do nothing."""
    _HANDLER.leavers.pop(leaver, None)
    if not _HANDLER.leavers and threading.current_thread() is threading.main_thread():
        _HANDLER.uninstall()
