"""The trainers and explorers that a synchronizer tracks, and the groups of torch.distributed that it sets up.

A module is any object with `is_alive()`. If it also has the methods of `SendsWeights` or `ReceivesWeights`, it can be
in a weight sync group. Methods may be coroutines or plain functions.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from averaging.errors import AveragingError, StateError
from averaging.rl.synchronizer.coordination import Coordination, SyncGroup
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
    def is_alive(self) -> Any: ...


@runtime_checkable
class GroupMember(Protocol):
    def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float, rank: int
    ) -> Any: ...

    def teardown_weight_sync_group(self) -> Any: ...


@runtime_checkable
class SendsWeights(GroupMember, Protocol):
    """A trainer of a weight sync group; see `WeightSender`."""

    def get_weight_sync_info(self) -> Any: ...


@runtime_checkable
class ReceivesWeights(GroupMember, Protocol):
    """An explorer of a weight sync group; see `WeightReceiver`."""

    def set_state_dict_meta(self, state_dict_meta: Meta) -> Any: ...


class Modules:
    """The tracked modules."""

    def __init__(self) -> None:
        self._modules: dict[Module, str] = {}  # with the name of their member
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


def groups_of(trainers: Collection[str], explorers: Collection[str]) -> list[SyncGroup]:
    """Divides the explorers evenly among the trainers. A trainer without explorers gets no group."""
    shares = [frozenset(list(explorers)[number :: len(trainers)]) for number in range(len(trainers))]
    return [SyncGroup(frozenset([trainer]), share) for trainer, share in zip(trainers, shares, strict=True) if share]


def groups_to_keep(
    intact: Collection[SyncGroup], caller: str, trainers: Collection[str], explorers: Collection[str]
) -> list[SyncGroup]:
    """Selects the groups that a new set-up leaves alone.

    Two trainers that lose members in turn would otherwise break each other's new group with each set-up.
    """
    if caller not in {*trainers, *explorers}:
        return []
    kept = [group for group in intact if caller not in group]
    free_trainers, free_explorers = (_free_of(kept, trainers), _free_of(kept, explorers))
    # If all are divided anew, free explorers get a trainer, and a free trainer gets explorers of a larger group.
    if free_explorers:
        return kept if free_trainers else []
    return [] if free_trainers and any(len(group.explorers) > 1 for group in kept) else kept


def _free_of(groups: Collection[SyncGroup], members: Collection[str]) -> list[str]:
    return [member for member in members if not any(member in group for group in groups)]


class WeightGroups:
    """The weight sync groups of one synchronizer: at most one set-up at a time, and it is all or none."""

    def __init__(self, name: str, tracked: Modules, state: Coordination) -> None:
        self._name, self._tracked, self._state = name, tracked, state
        self._setting_up: asyncio.Task[None] | None = None

    async def set_up(self, timeout: float, member: str) -> None:
        """Sets groups up, or waits for a set-up in progress. See `Synchronizer.coordinate_weight_sync_setup`."""
        setting_up = self._setting_up
        if setting_up is None or setting_up.done():
            setting_up = self._setting_up = asyncio.get_running_loop().create_task(self._set_up(timeout, member))
            setting_up.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([setting_up])  # it goes on if this caller is cancelled, for others may wait for it too
        if setting_up.cancelled():
            raise StateError("the set-up of the weight sync groups was given up")
        setting_up.result()

    async def join(self, address: str, port: int, meta: Meta | None, timeout: float) -> None:
        """Lets the explorers join the group of a trainer. See `Synchronizer.setup_weight_sync_group`."""
        explorers = self._tracked.receivers()
        if not explorers:
            raise StateError("there is no explorer for a weight sync group; add_module() adds one")
        async with _all_or_none({}, explorers, timeout):
            await self._join(explorers, (address, port, meta), timeout)
        self._state.set_groups(None)

    async def tear_down(self) -> None:
        """Lets all members leave. See `Synchronizer.coordinate_weight_sync_teardown`."""
        await self.give_up()
        self._state.set_groups(None)
        await _tear_down(self._tracked.senders(), self._tracked.receivers())

    async def give_up(self) -> None:
        """Ends a set-up in progress."""
        setting_up, self._setting_up = self._setting_up, None
        if setting_up is not None and not setting_up.done():
            setting_up.cancel()
            await asyncio.wait([setting_up])

    async def _set_up(self, timeout: float, member: str) -> None:
        trainers, explorers = self._tracked.senders(), self._tracked.receivers()
        kept = groups_to_keep(self._state.intact_groups(), member, trainers, explorers)
        trainers = {name: trainers[name] for name in _free_of(kept, trainers)}
        explorers = {name: explorers[name] for name in _free_of(kept, explorers)}
        self._state.set_groups(kept, complete=False)
        added: list[SyncGroup] = []
        try:
            if not trainers or not explorers:
                missing = "explorer" if trainers else "trainer"
                raise StateError(f"there is no {missing} for a weight sync group; add_module() adds one")
            groups = groups_of(trainers, explorers)
            async with _all_or_none(trainers, explorers, timeout), asyncio.TaskGroup() as tasks:
                for group in groups:
                    [name], members = group.trainers, {each: explorers[each] for each in sorted(group.explorers)}
                    tasks.create_task(self._set_up_group(name, trainers[name], members, timeout))
            added = groups
        finally:
            self._state.set_groups([*kept, *added])
        logger.info("%d weight sync groups are set up, %d were kept", len(added), len(kept))

    async def _set_up_group(
        self, name: str, trainer: SendsWeights, explorers: dict[str, ReceivesWeights], timeout: float
    ) -> None:
        place = await _call("trainer", name, trainer.get_weight_sync_info)
        await self._join(explorers, place, timeout, (name, trainer))

    async def _join(
        self,
        explorers: dict[str, ReceivesWeights],
        place: tuple[str, int, Meta | None],
        timeout: float,
        trainer: tuple[str, SendsWeights] | None = None,
    ) -> None:
        """Lets explorers join as ranks 1, 2, …, and a trainer as rank 0 unless it joins on its own; gives the meta."""
        address, port, meta = place
        arguments = address, port, len(explorers) + 1, self._name, timeout
        async with asyncio.TaskGroup() as tasks:  # no member returns before all have joined
            if trainer is not None:
                tasks.create_task(_call("trainer", trainer[0], trainer[1].setup_weight_sync_group, *arguments, 0))
            for rank, (name, explorer) in enumerate(explorers.items(), 1):
                tasks.create_task(_call("explorer", name, explorer.setup_weight_sync_group, *arguments, rank))
        if meta is not None:
            async with asyncio.TaskGroup() as tasks:
                for name, explorer in explorers.items():
                    tasks.create_task(_call("explorer", name, explorer.set_state_dict_meta, meta))


@asynccontextmanager
async def _all_or_none(
    trainers: dict[str, SendsWeights], explorers: dict[str, ReceivesWeights], timeout: float
) -> AsyncIterator[None]:
    """After an error inside, all members leave their groups."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except BaseException as error:
        await _tear_down(trainers, explorers)
        if isinstance(error, TimeoutError):
            raise StateError(
                f"not all members joined the weight sync group within {timeout:g} s; set it up again"
            ) from None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _tear_down(trainers: dict[str, SendsWeights], explorers: dict[str, ReceivesWeights]) -> None:
    """Lets all members leave: first the explorers, so that none waits for a transfer, then the trainers."""

    async def leave(kind: str, name: str, module: GroupMember) -> None:
        try:
            async with asyncio.timeout(TEARDOWN_SECONDS):
                await result_of(module.teardown_weight_sync_group())
        except Exception as error:
            logger.warning("%s %s could not leave its weight sync group: %r", kind, name, error)

    await asyncio.gather(*(leave("explorer", name, explorer) for name, explorer in explorers.items()))
    await asyncio.gather(*(leave("trainer", name, trainer) for name, trainer in trainers.items()))


async def _call(kind: str, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of a module. Turns an error into a `StateError` that names the module."""
    try:
        return await result_of(method(*arguments))
    except Exception as error:
        reason = str(error) if isinstance(error, AveragingError) else repr(error)
        who = f"{kind} {name!r}" if name else f"the {kind}"
        raise StateError(f"{who} could not join the weight sync group: {reason}") from error
