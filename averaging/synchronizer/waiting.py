"""The tasks that wait for an answer of a `Coordination`."""

from __future__ import annotations

import asyncio

from averaging.errors import ClosedError
from averaging.synchronizer.coordination import Coordination, End, Wait


def now() -> float:
    """The clock of all deadlines."""
    return asyncio.get_running_loop().time()


class Waiting:
    """Wakes tasks whose waits have ended.

    Args:
        state: The waits. After each change of it `release` is called.
    """

    def __init__(self, state: Coordination) -> None:
        self._state = state
        self._futures: dict[Wait, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def release(self) -> None:
        """Wakes the tasks whose waits have ended."""
        for wait, future in self._futures.items():
            if wait.end is not None and not future.done():
                future.set_result(None)

    async def end_of(self, wait: Wait) -> Wait:
        """Returns the wait when it has ended. If this is cancelled, the member no longer waits.

        Raises:
            ClosedError: The member has left, or the synchronizer has ended.
        """
        self.release()
        if wait.end is None:
            future = self._futures[wait] = asyncio.get_running_loop().create_future()
            try:
                while wait.end is None:
                    await asyncio.wait([future], timeout=max(0.0, wait.deadline - now()))
                    self._state.expire(now())
            finally:
                del self._futures[wait]
                self._state.cancel(wait)
                self.release()
        if wait.end is End.LEFT:
            raise ClosedError("the member that waits has left the synchronizer, or the synchronizer has ended")
        return wait
