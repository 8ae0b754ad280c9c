"""Finds leaks: tasks, collections that have grown, objects of finished rounds."""

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from averaging.allreduce import AllReduce
from averaging.allreduce.reducer_side import ReducerSide
from averaging.allreduce.round_tally import RoundTally
from averaging.allreduce.sender_side import SenderSide
from averaging.allreduce.stream_limits import WaitMonitor
from averaging.matchmaking import search_state
from averaging.matchmaking.memory import Conduct
from averaging.peer.rounds import _Round
from averaging.receipts import Totals
from averaging.state.assembler import StateAssembler
from averaging.testing.transport import MemoryNetwork
from averaging.timing.deadlines import Deadlines

PASSING = (
    AllReduce,
    RoundTally,
    ReducerSide,
    SenderSide,
    WaitMonitor,
    search_state.SearchState,
    _Round,
    StateAssembler,
)
"""Types whose objects must not outlive their round, search or download."""

ON_PURPOSE = ("_expirations", "_scheduled", "_sealed", "_copy")
"""Heaps that keep outdated entries for a while, such as cancelled timers, and the state that others download."""

BOUNDED = (Deadlines, Conduct, Totals)
"""Types that remember members intentionally, up to a limit that other tests check."""


def tasks() -> Counter[str]:
    return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]


def passing() -> Counter[str]:
    """The objects of rounds, searches and downloads that are still in memory, garbage excepted."""
    gc.collect()
    return Counter(type(found).__name__ for found in gc.get_objects() if type(found) in PASSING)


def sizes(root: object) -> Counter[str]:
    """The size of every collection that is reachable from `root` through objects of this library."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or isinstance(value, BOUNDED):
            continue
        seen.add(id(value))
        if isinstance(value, MemoryNetwork):
            found[f"{path}._open"] = len(value._open)
            continue
        if isinstance(value, asyncio.Semaphore):
            found[f"{path}, taken"] -= value._value
        elif isinstance(value, asyncio.Queue):
            found[path] += value.qsize()
        elif isinstance(value, deque) and value.maxlen is not None:
            continue
        elif isinstance(value, Mapping | list | set | deque | bytearray):
            found[path] += len(value)
            if not isinstance(value, bytearray):
                waiting += [(f"{path}[]", one) for one in (value.values() if isinstance(value, Mapping) else value)]
        elif type(value).__module__.startswith("averaging."):
            waiting += [(f"{path}.{name}", one) for name, one in _attributes(value) if name not in ON_PURPOSE]
    return found


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        yield from ((name, getattr(value, name)) for name in getattr(kind, "__slots__", ()) if hasattr(value, name))
