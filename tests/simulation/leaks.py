"""What is left behind: tasks, collections that have grown, objects of rounds that are over."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from averaging.allreduce import AllReduce
from averaging.allreduce.reducing import Reducing
from averaging.allreduce.sending import Sending
from averaging.allreduce.tally import Tally
from averaging.allreduce.watch import Watch
from averaging.deadlines.learned import Deadlines
from averaging.matchmaking import search
from averaging.matchmaking.answers import Answers
from averaging.matchmaking.conduct import Conduct
from averaging.peer.rounds import _Attempt
from averaging.state.reader import StateReader
from averaging.transport.memory import MemoryNetwork

PASSING = (AllReduce, Tally, Reducing, Sending, Watch, search.Search, _Attempt, StateReader)
"""Nothing of these outlives its round, search or download."""

ON_PURPOSE = ("_expirations", "_scheduled", "_sealed", "_copy")
"""Heaps in which what is outdated stays for a while, as cancelled timers do, and the one state that others download."""

BOUNDED = (Deadlines, Conduct, Answers)
"""They remember members on purpose, up to a number that tests of their own check."""


def tasks() -> Counter[str]:
    """What runs in the loop now."""
    return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]


def passing() -> Counter[str]:
    """The objects of rounds, searches and downloads that are still in memory, garbage excepted."""
    gc.collect()
    return Counter(type(found).__name__ for found in gc.get_objects() if type(found) in PASSING)


def sizes(root: object) -> Counter[str]:
    """How many elements every collection has that can be reached from `root` through objects of this library."""
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
