"""The trainers and explorers that a synchronizer tracks, and the groups of torch.distributed that it sets up.

A module is any object with `is_alive()`. If it also has the methods of `SendsWeights` or `ReceivesWeights`, it can be
in a weight sync group. Methods may be coroutines or plain functions. `Waiters` are the tasks that wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from averaging.errors import AveragingError, ClosedError, StateError
from averaging.rl.synchronizer.coordination import Coordination, End, SyncGroup, Wait
from averaging.rl.synchronizer.state_stream import Meta

logger = logging.getLogger("averaging.rl.synchronizer")

POLL_SECONDS = 1.0
"""Interval at which modules are asked whether they are alive."""

ANSWER_SECONDS = 5.0
"""A module that does not answer for this time is busy, not dead."""

TEARDOWN_SECONDS = 10.0
"""Time limit for a module to leave its group. A dead module must not hold up the others."""

GROUP_SECONDS = 300.0
"""Default time limit for the set-up of a weight sync group and for one transfer of a tensor in it."""


class Module(Protocol):
    """What a synchronizer tracks."""

    def is_alive(self) -> Any: ...


@runtime_checkable
class SendsWeights(Protocol):
    """A trainer of a weight sync group; see `WeightSender`."""

    def get_weight_sync_info(self) -> Any: ...

    def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float, rank: int
    ) -> Any: ...

    def teardown_weight_sync_group(self) -> Any: ...


@runtime_checkable
class ReceivesWeights(Protocol):
    """An explorer of a weight sync group; see `WeightReceiver`."""

    def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float, rank: int
    ) -> Any: ...

    def set_state_dict_meta(self, state_dict_meta: Meta) -> Any: ...

    def teardown_weight_sync_group(self) -> Any: ...


class Modules:
    """The tracked modules, by the name of their member."""

    def __init__(self) -> None:
        self._modules: dict[Module, str] = {}
        self.tracked = False

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: Module, member: str) -> None:
        self.tracked = True
        self._modules.setdefault(module, member)

    def remove(self, member: str) -> None:
        self._modules = {module: name for module, name in self._modules.items() if name != member}

    async def dead(self) -> list[str]:
        """Forgets the modules that are dead, and returns the members of which none is left."""
        modules = list(self._modules)
        alive = await asyncio.gather(*map(_is_alive, modules))
        gone = {self._modules.pop(module, "") for module, lives in zip(modules, alive, strict=True) if not lives}
        return sorted(gone - set(self._modules.values()))

    def senders(self) -> dict[str, SendsWeights]:
        return {member: module for module, member in self._modules.items() if isinstance(module, SendsWeights)}

    def receivers(self) -> dict[str, ReceivesWeights]:
        return {member: module for module, member in self._modules.items() if isinstance(module, ReceivesWeights)}


async def _is_alive(module: Module) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return bool(await result_of(module.is_alive()))
    except TimeoutError:
        return True
    except Exception as error:
        logger.info("a module is dead: %r", error)
        return False


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True, slots=True)
class _Plan:
    trainer: tuple[str, SendsWeights]
    explorers: Mapping[str, ReceivesWeights]

    @property
    def group(self) -> SyncGroup:
        return SyncGroup(frozenset([self.trainer[0]]), frozenset(self.explorers))


def _plans(trainers: Mapping[str, SendsWeights], explorers: Mapping[str, ReceivesWeights]) -> Iterator[_Plan]:
    """Divides the explorers evenly among the trainers. A trainer without explorers gets no group."""
    names = list(explorers)
    for number, trainer in enumerate(trainers.items()):
        share = names[number :: len(trainers)]
        if share:
            yield _Plan(trainer, {name: explorers[name] for name in share})


def free_of(
    groups: Collection[SyncGroup], trainers: Mapping[str, SendsWeights], explorers: Mapping[str, ReceivesWeights]
) -> tuple[dict[str, SendsWeights], dict[str, ReceivesWeights]]:
    """Returns the trainers and the explorers that are in none of the groups."""
    taken = {member for group in groups for member in group.trainers | group.explorers}
    return (
        {name: trainer for name, trainer in trainers.items() if name not in taken},
        {name: explorer for name, explorer in explorers.items() if name not in taken},
    )


def groups_to_keep(
    intact: Collection[SyncGroup],
    caller: str,
    trainers: Mapping[str, SendsWeights],
    explorers: Mapping[str, ReceivesWeights],
) -> list[SyncGroup]:
    """Selects the groups that a new set-up leaves alone, so that it interrupts no transfer without need.

    Empty if the caller is in no group, or if keeping these groups would leave out a member that could be placed.
    """
    kept = [group for group in intact if caller not in group]
    alone_trainers, alone_explorers = free_of(kept, trainers, explorers)
    movable = any(len(group.explorers) > 1 for group in kept)
    if caller not in {*trainers, *explorers} or (alone_explorers and not alone_trainers):
        return []
    return [] if alone_trainers and not alone_explorers and movable else kept


async def set_up(
    trainers: Mapping[str, SendsWeights], explorers: Mapping[str, ReceivesWeights], group_name: str, timeout: float
) -> list[SyncGroup]:
    """Sets up one group for each trainer, with its share of the explorers; all members join at the same time.

    Returns:
        The groups.

    Raises:
        StateError: A member failed or was late. All others have left their groups then.
    """
    if not trainers or not explorers:
        missing = "trainer" if not trainers else "explorer"
        raise StateError(f"there is no {missing} for a weight sync group; add_module() adds one")
    plans = list(_plans(trainers, explorers))
    async with _all_or_none(trainers, explorers, timeout), asyncio.TaskGroup() as tasks:
        for plan in plans:
            tasks.create_task(_set_up_group(plan, group_name, timeout))
    return [plan.group for plan in plans]


async def _set_up_group(plan: _Plan, group_name: str, timeout: float) -> None:
    name, trainer = plan.trainer
    address, port, meta = await _call("trainer", name, trainer.get_weight_sync_info)
    await _join(plan.explorers, address, port, meta, group_name, timeout, plan.trainer)


async def join_explorers(
    explorers: Mapping[str, ReceivesWeights],
    address: str,
    port: int,
    meta: Meta | None,
    group_name: str,
    timeout: float,
) -> None:
    """Lets the explorers join the group of a trainer that joins as rank 0 on its own.

    Raises:
        StateError: There is no explorer, or one failed. All explorers have left then.
    """
    if not explorers:
        raise StateError("there is no explorer for a weight sync group; add_module() adds one")
    async with _all_or_none({}, explorers, timeout):
        await _join(explorers, address, port, meta, group_name, timeout)


@asynccontextmanager
async def _all_or_none(
    trainers: Mapping[str, SendsWeights], explorers: Mapping[str, ReceivesWeights], timeout: float
) -> AsyncIterator[None]:
    """After an error inside, all members leave their groups."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except BaseException as error:
        await tear_down(trainers, explorers)
        if isinstance(error, TimeoutError):
            raise StateError(
                f"not all members joined the weight sync group within {timeout:g} s; set it up again"
            ) from None
        if isinstance(error, BaseExceptionGroup):
            raise _first(error) from None
        raise


async def _join(
    explorers: Mapping[str, ReceivesWeights],
    address: str,
    port: int,
    meta: Meta | None,
    group_name: str,
    timeout: float,
    trainer: tuple[str, SendsWeights] | None = None,
) -> None:
    """Lets the explorers join a group as ranks 1, 2, …, and a trainer as rank 0; then gives the explorers the meta."""
    size = len(explorers) + 1
    async with asyncio.TaskGroup() as tasks:  # no member returns before all have joined
        if trainer is not None:
            join = partial(trainer[1].setup_weight_sync_group, address, port, size, group_name, timeout, 0)
            tasks.create_task(_call("trainer", trainer[0], join))
        for rank, (name, explorer) in enumerate(explorers.items(), 1):
            join = partial(explorer.setup_weight_sync_group, address, port, size, group_name, timeout, rank)
            tasks.create_task(_call("explorer", name, join))
    if meta is not None:
        async with asyncio.TaskGroup() as tasks:
            for name, explorer in explorers.items():
                tasks.create_task(_call("explorer", name, partial(explorer.set_state_dict_meta, meta)))


async def tear_down(trainers: Mapping[str, SendsWeights], explorers: Mapping[str, ReceivesWeights]) -> None:
    """Lets all members leave their groups: first the explorers, then the trainers. Errors are logged."""

    async def leave(kind: str, name: str, module: SendsWeights | ReceivesWeights) -> None:
        try:
            async with asyncio.timeout(TEARDOWN_SECONDS):
                await result_of(module.teardown_weight_sync_group())
        except Exception as error:
            logger.warning("%s %s could not leave its weight sync group: %r", kind, name, error)

    await asyncio.gather(*(leave("explorer", name, explorer) for name, explorer in explorers.items()))
    await asyncio.gather(*(leave("trainer", name, trainer) for name, trainer in trainers.items()))


async def _call(kind: str, name: str, method: Callable[[], Any]) -> Any:
    """Calls a method of a module. Turns an error into a `StateError` that names the module."""
    try:
        return await result_of(method())
    except Exception as error:
        reason = str(error) if isinstance(error, AveragingError) else repr(error)
        who = f"{kind} {name!r}" if name else f"the {kind}"
        raise StateError(f"{who} could not join the weight sync group: {reason}") from error


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def now() -> float:
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


class WeightGroups:
    """The weight sync groups of one synchronizer: at most one set-up at a time.

    Args:
        name: The name of all groups.
        tracked: The modules that can be members.
        state: Updated with the groups.
        waiting: Woken after each change.
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
        await join_explorers(self._tracked.receivers(), address, port, meta, self._name, timeout)
        self._set(None)

    async def tear_down(self) -> None:
        """Lets all members leave. See `Synchronizer.coordinate_weight_sync_teardown`."""
        await self.give_up()
        self._set(None)
        await tear_down(self._tracked.senders(), self._tracked.receivers())

    async def give_up(self) -> None:
        """Ends a set-up in progress."""
        setting_up, self._setting_up = self._setting_up, None
        if setting_up is not None and not setting_up.done():
            setting_up.cancel()
            await asyncio.wait([setting_up])

    async def _set_up(self, timeout: float, member: str) -> None:
        trainers, explorers = self._tracked.senders(), self._tracked.receivers()
        kept = groups_to_keep(self._state.intact_groups(), member, trainers, explorers)
        self._set(kept, complete=False)
        added: list[SyncGroup] = []
        try:
            added = await set_up(*free_of(kept, trainers, explorers), self._name, timeout)
        finally:
            self._set([*kept, *added])
        logger.info("%d weight sync groups are set up, %d were kept", len(added), len(kept))

    def _set(self, groups: list[SyncGroup] | None, *, complete: bool = True) -> None:
        self._state.set_groups(groups, complete=complete)
        self._waiting.release()


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
