"""SIGTERM, which every scheduler sends before SIGKILL: the peers of this process leave their runs in order.

Peers that vanish without a word cost the others seconds in each round until their records have expired.
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
    """What leaves on SIGTERM."""

    def begin_to_leave(self) -> None:
        """Begins to leave its run, without waiting."""
        ...

    def leave(self) -> None:
        """Leaves its run, and waits until that is done."""
        ...


Before: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class _Handler:
    """Takes SIGTERM for all leavers of the process, and hands it on to whatever took it before."""

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
        """Takes the signal, unless it is ignored, or C code takes it, which nobody could hand it on to."""
        before = signal.getsignal(signal.SIGTERM)
        if before not in (self, signal.SIG_IGN, None):
            self._before = before
            signal.signal(signal.SIGTERM, self)

    def uninstall(self) -> None:
        """Gives the signal back, unless somebody else has taken it since, who may hand it on."""
        is_installed = signal.getsignal(signal.SIGTERM) == self
        if is_installed:
            signal.signal(signal.SIGTERM, self._before)


_HANDLER = _Handler()


def leave_on_sigterm(leaver: LeavesOnSigterm) -> None:
    """Has `leaver` leave when SIGTERM comes. Only the main thread can do so; in another thread nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        return
    _HANDLER.leavers[leaver] = None
    _HANDLER.install()


def stay_on_sigterm(leaver: LeavesOnSigterm) -> None:
    """Ends what `leave_on_sigterm` began; again, it does nothing."""
    _HANDLER.leavers.pop(leaver, None)
    if not _HANDLER.leavers and threading.current_thread() is threading.main_thread():
        _HANDLER.uninstall()
