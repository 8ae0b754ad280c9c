"""The weight sync groups of one synchronizer: at most one set-up at a time, and which groups it leaves alone."""

from __future__ import annotations

import asyncio
import logging

from averaging.errors import ClosedError, StateError
from averaging.rl.synchronizer import modules
from averaging.rl.synchronizer.coordination import Coordination, End, SyncGroup, Wait
from averaging.rl.synchronizer.modules import Modules
from averaging.rl.synchronizer.state_stream import Meta

# The tasks that wait for an answer of a `Coordination`.


def now() -> float:
    """The clock of all deadlines."""
    return asyncio.get_running_loop().time()


class Waiters:
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


logger = logging.getLogger("averaging.rl.synchronizer")


class WeightGroups:
    """The groups.

    Args:
        name: The name of all groups.
        tracked: The modules that can be members.
        state: Is given the groups.
        waiting: Those who wait for a group.
    """

    def __init__(self, name: str, tracked: Modules, state: Coordination, waiting: Waiters) -> None:
        self._name = name
        self._tracked = tracked
        self._state = state
        self._waiting = waiting
        self._setting_up: asyncio.Task[None] | None = None

    async def set_up(self, timeout: float, member: str) -> None:
        """Sets groups up, or waits for a set-up in progress. See `Synchronizer.coordinate_weight_sync_setup`."""
        setting_up = self._setting_up
        if setting_up is None or setting_up.done():
            setting_up = asyncio.get_running_loop().create_task(self._set_up(timeout, member))
            setting_up.add_done_callback(_retrieve)  # all who wait for it may be cancelled
            self._setting_up = setting_up
        try:
            await asyncio.shield(setting_up)
        except asyncio.CancelledError:
            if setting_up.cancelled():
                raise StateError("the set-up of the weight sync groups was given up") from None
            raise

    async def join(self, address: str, port: int, meta: Meta | None, timeout: float) -> None:
        """Lets the explorers join the group of a trainer. See `Synchronizer.setup_weight_sync_group`."""
        await modules.join_explorers(self._tracked.receivers(), address, port, meta, self._name, timeout)
        self._set(None)

    async def tear_down(self) -> None:
        """Lets all members leave. See `Synchronizer.coordinate_weight_sync_teardown`."""
        await self.give_up()
        self._set(None)
        await modules.tear_down(self._tracked.senders(), self._tracked.receivers())

    async def give_up(self) -> None:
        """Ends a set-up in progress."""
        setting_up, self._setting_up = self._setting_up, None
        if setting_up is not None and not setting_up.done():
            setting_up.cancel()
            await asyncio.wait([setting_up])

    async def _set_up(self, timeout: float, member: str) -> None:
        trainers, explorers = self._tracked.senders(), self._tracked.receivers()
        kept = modules.groups_to_keep(self._state.intact_groups(), member, trainers, explorers)
        self._set(kept, complete=False)
        found: list[SyncGroup] = []
        try:
            found = await modules.set_up(*modules.free_of(kept, trainers, explorers), self._name, timeout)
        finally:
            self._set([*kept, *found])
        logger.info("%d weight sync groups are set up, %d were kept", len(found), len(kept))

    def _set(self, groups: list[SyncGroup] | None, *, complete: bool = True) -> None:
        self._state.set_groups(groups, complete=complete)
        self._waiting.release()


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
