"""Whether a history of a compare-and-set register is linearizable: the search of Wing and Gong, with Lowe's memory.

Each value is written by at most one operation, so that a token stands for the value that it came with.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from averaging.elastic.register import Register, RegisterEntry
from averaging.errors import AveragingError
from tests.support.fault_proxy import Fault, FaultProxy

INFINITE = 1 << 60


@dataclass(slots=True)
class Operation:
    """One call. The moments are numbers that grow.

    Attributes:
        new: The value to set; None for a read.
        expected: The value that must be there; None for no entry.
        found: What was there afterwards; None for no entry.
        done: Whether it was set.
        returned: When it returned; None if it failed, so that it may have taken effect at any later moment, or never.
    """

    called: int
    new: bytes | None = None
    expected: bytes | None = None
    found: bytes | None = None
    done: bool = False
    returned: int | None = None

    def apply(self, state: bytes | None) -> tuple[bool, bytes | None]:
        """Whether it can take effect in `state`, and the state after it."""
        if self.new is None:
            return self.returned is None or self.found == state, state
        fits = self.expected == state
        after = self.new if fits else state
        if self.returned is None:  # without an effect it need not be looked at
            return fits, after
        return self.done == fits and self.found == after, after


def is_linearizable(history: list[Operation]) -> bool:
    """Whether the operations can be put into an order that fits their times and what they returned."""
    told = [operation for operation in history if operation.returned is not None or operation.new is not None]
    operations = sorted(told, key=lambda operation: operation.called)  # of a read that failed nothing is known
    everything = frozenset(i for i, operation in enumerate(operations) if operation.returned is not None)
    seen: set[tuple[frozenset[int], bytes | None]] = set()
    stack: list[tuple[frozenset[int], bytes | None]] = [(frozenset(), None)]
    while stack:
        past, state = stack.pop()
        if everything <= past:
            return True
        if (past, state) in seen:
            continue
        seen.add((past, state))
        open_ = [i for i in range(len(operations)) if i not in past]
        first_return = min(operations[i].returned or INFINITE for i in open_)
        for i in open_:
            if operations[i].called > first_return:
                break
            possible, after = operations[i].apply(state)
            if possible:
                stack.append((past | {i}, after))
    return False


def periodic_faults(proxy: FaultProxy, rng: random.Random, max_bytes: int) -> Callable[[], None]:
    """A function that cuts and heals the link of the proxy periodically, by the number of its calls."""
    calls = itertools.count()

    def next_fault() -> None:
        match next(calls) % 25:
            case 6:
                proxy.arm(Fault.CUT, after=rng.randrange(max_bytes))
            case 14:
                proxy.arm(Fault.HALF_OPEN)
            case 18:
                proxy.heal()

    return next_fault


@dataclass
class Recorder:
    """Calls a register as several clients at the same time, and writes down what they see."""

    history: list[Operation] = field(default_factory=list)
    failures: int = 0

    async def run(
        self,
        registers: list[Register],
        rng: random.Random,
        calls: int,
        between: Callable[[], None] = lambda: None,
        key: str = "key",
    ) -> None:
        """Each register is one client's, and makes so many calls; `between` is called before each of them."""
        moments = itertools.count(1)
        tokens: dict[bytes, bytes] = {}  # the value of each token

        def seen(entry: RegisterEntry | None) -> bytes | None:
            if entry is None:
                return None
            assert tokens.setdefault(entry.token, entry.value) == entry.value, "one token for two values"
            return entry.value

        async def client(number: int, register: Register) -> None:
            token: bytes | None = None
            for call in range(calls):
                between()
                operation = Operation(next(moments))
                self.history.append(operation)
                try:
                    if rng.random() < 0.4:
                        entry = await register.get(key)
                    else:
                        operation.new = f"{number}.{call}".encode()
                        operation.expected = tokens[token] if token else None
                        written = await register.compare_and_set(key, operation.new, token)
                        entry, operation.done = written.entry, written.done
                except AveragingError:
                    self.failures += 1
                    continue
                operation.found = seen(entry)
                token = entry.token if entry else None
                operation.returned = next(moments)

        async with asyncio.TaskGroup() as tasks:
            for number, register in enumerate(registers):
                tasks.create_task(client(number, register))
