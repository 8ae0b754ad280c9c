"""Faults inside a process that only its own code can make: a clock that steps, a blocked event loop, a held GIL.

A worker imports this module before everything else, and starts `obey`. A command of averaging is run with it as
`python -m tests.endurance.hooked feed …`. The lines on stdin are `clock SECONDS`, `loop SECONDS` and `gil SECONDS`.
"""

import asyncio
import ctypes
import threading
import time
import weakref
from typing import Any

_true_time, _run_forever = time.time, asyncio.SelectorEventLoop.run_forever
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
ahead = 0.0


def _stepped_time() -> float:
    return _true_time() + ahead


def _noted_run_forever(self: Any) -> None:
    _loops.add(self)
    _run_forever(self)


time.time = _stepped_time
asyncio.SelectorEventLoop.run_forever = _noted_run_forever  # type: ignore[method-assign]


def do(command: str) -> None:
    """Makes the fault of one line."""
    global ahead
    what, _, seconds = command.partition(" ")
    match what:
        case "clock":
            ahead = float(seconds)
        case "loop":
            for loop in list(_loops):
                if loop.is_running():
                    loop.call_soon_threadsafe(time.sleep, float(seconds))
        case "gil":
            ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # a PyDLL keeps the lock during a call


def obey() -> None:
    """Follows the lines on stdin in a thread of its own. The process ends with its parent."""

    def follow() -> None:
        # Without a buffer, whose lock would keep the interpreter from ending while this thread reads.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            while line := lines.readline():
                do(line.decode().strip())

    threading.Thread(target=follow, daemon=True).start()


if __name__ == "__main__":
    from averaging.cli import main  # after the clock was replaced, of which modules keep a reference
    from averaging.config import PeerConfig

    PeerConfig.part_size_bytes = 1 << 14  # as those that train
    obey()
    main()
