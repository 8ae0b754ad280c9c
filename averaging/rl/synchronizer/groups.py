"""Weight sync groups: a trainer sends its weights to explorers with a collective of torch.distributed.

A module is any object with `is_alive()`. If it also has the methods of `SendsWeights` or `ReceivesWeights`, it can be
in a group. Methods may be coroutines or plain functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch._C import _distributed_c10d as c10d

from averaging.common import first_error, format_address, is_own, loopback_here, parse_address
from averaging.errors import AveragingError, ConfigError, StateError
from averaging.rl.synchronizer.coordination import Coordination, SyncGroup
from averaging.rl.synchronizer.methods import Meta, StateDict, meta_of
from averaging.tensors import DTYPES, in_thread

T = TypeVar("T")

logger = logging.getLogger("averaging.rl.synchronizer")

POLL_SECONDS = 1.0  # interval at which modules are asked whether they are alive
ANSWER_SECONDS = 5.0  # a module that does not answer for this time is busy, not dead
TEARDOWN_SECONDS = 10.0  # for a module to leave its group: a dead one must not hold up the others
GROUP_SECONDS = 300.0  # default for the set-up of a group and for one transfer of a tensor in it
LOOK_SECONDS = 0.02  # interval at which a member looks whether the others have joined
CONNECT_SECONDS = 2.0  # for one try to reach the first member
_TRANSFER_SECONDS = 0.0005  # interval of looks whether a tensor has come: between GPUs of a machine it takes no longer
_NCCL_PATIENCE = timedelta(days=1)  # added to NCCL's time limit, which would end this process; members have their own
_DIGEST_BYTES = 32


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
    """The modules that a synchronizer tracks."""

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
    """Selects the groups that a new set-up leaves alone, so that trainers do not break each other's in turn."""
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
        """Sets groups up, or waits for a set-up in progress."""
        setting_up = self._setting_up
        if setting_up is None or setting_up.done():
            setting_up = self._setting_up = asyncio.get_running_loop().create_task(self._set_up(timeout, member))
            setting_up.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([setting_up])  # it goes on if this caller is cancelled, for others may wait for it too
        if setting_up.cancelled():
            raise StateError("the set-up of the weight sync groups was given up")
        setting_up.result()

    async def join(self, address: str, port: int, meta: Meta | None, timeout: float) -> None:
        explorers = self._tracked.receivers()
        if not explorers:
            raise StateError("there is no explorer for a weight sync group; add_module() adds one")
        async with _all_or_none({}, explorers, timeout):
            await self._join(explorers, (address, port, meta), timeout)
        self._state.set_groups(None)

    async def tear_down(self) -> None:
        await self.give_up()
        self._state.set_groups(None)
        await _tear_down(self._tracked.senders(), self._tracked.receivers())

    async def give_up(self) -> None:
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
        raise first_error(error) from None


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


class _CollectiveMember:
    def __init__(self, backend: str = "gloo", device: torch.device | str = "cpu") -> None:
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend {backend!r} of a weight sync group must be gloo or nccl")
        self._backend = backend
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None  # of c10d
        self._timeout = 0.0
        self._leaving = threading.Event()

    def is_alive(self) -> bool:
        return True

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float, rank: int
    ) -> None:
        """Leaves the former group and joins another one, of which the trainer is rank 0; returns when all have joined.

        Raises:
            StateError: The others did not join in time, or `teardown_weight_sync_group` was called meanwhile.
        """
        await self.teardown_weight_sync_group()
        self._leaving = leaving = threading.Event()
        self._timeout = timeout
        end = time.monotonic() + timeout

        def wait_until(ready: Callable[[], bool]) -> None:
            while not ready():
                if leaving.wait(LOOK_SECONDS):
                    raise StateError("the set-up of the weight sync group was given up")
                if time.monotonic() > end:
                    raise StateError(f"not all {world_size} members joined within {timeout:g} s")

        def join() -> Any:
            # A store that waits for its first member cannot be interrupted, so it is created when that is there.
            wait_until(lambda: rank == 0 or _own_address(master_address, master_port) is not None)
            limit = timedelta(seconds=timeout)
            store = c10d.TCPStore(
                master_address, master_port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False
            )
            # Nor can the group: it is created when all members are at the store.
            joined = [f"{group_name}/joined/{number}" for number in range(world_size)]
            store.set(joined[rank], "1")
            wait_until(lambda: store.check(joined))
            own = _own_address(master_address, master_port)
            return self._new_group(c10d.PrefixStore(group_name, store), rank, world_size, limit, own)

        try:
            self._group = await _interruptible(join, leaving)
        except (RuntimeError, ValueError) as error:
            where = format_address(master_address, master_port)
            raise StateError(f"the weight sync group at {where}: {error}") from None

    def _new_group(self, store: Any, rank: int, world_size: int, limit: timedelta, own: str | None) -> Any:
        if self._backend == "gloo":
            if own is None or not is_own(own) or os.environ.get("GLOO_SOCKET_IFNAME"):
                return c10d.ProcessGroupGloo(store, rank, world_size, limit)
            # By default gloo looks up this machine's name, which may be unknown, or that of a loopback address.
            gloo = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch tells it to nobody
            gloo._timeout, gloo._devices = limit, [c10d.ProcessGroupGloo.create_device(hostname=own)]
            return c10d.ProcessGroupGloo(store, rank, world_size, gloo)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit + _NCCL_PATIENCE
        with _errors_stay_here():
            return c10d.ProcessGroupNCCL(store, rank, world_size, options)

    async def teardown_weight_sync_group(self) -> None:
        """Leaves the group. A set-up or a transfer in progress ends with an error."""
        self._leaving.set()
        group, self._group = self._group, None
        if group is not None:
            await in_thread(group.abort if hasattr(group, "abort") else group.shutdown)

    async def _in_group(self, action: Callable[[Callable[[torch.Tensor], None]], T]) -> T:
        """Runs `action` in a thread, with a function that broadcasts one tensor from rank 0."""
        group, leaving = self._group, self._leaving
        if group is None:
            raise StateError("there is no weight sync group; coordinate_weight_sync_setup() makes one")

        def broadcast(raw: torch.Tensor) -> None:
            travelling = raw if raw.device == self._device else raw.to(self._device)
            work = group.broadcast(travelling, 0)
            end = time.monotonic() + self._timeout
            while not work.is_completed():  # a wait with a time limit would end the group
                if leaving.wait(_TRANSFER_SECONDS):
                    raise StateError("this member left the weight sync group during a transfer")
                if time.monotonic() > end:
                    raise StateError(f"the other members did nothing for {self._timeout:g} s during a transfer")
            work.wait()  # raises what has happened; the values are those of this thread's stream from now on
            if travelling is not raw:
                raw.copy_(travelling)

        try:
            return await _interruptible(lambda: action(broadcast), leaving)
        except RuntimeError as error:
            raise StateError(f"a member of the weight sync group was lost: {error}") from None


class WeightSender(_CollectiveMember):
    """The trainer's end of a weight sync group.

    ```python
    sender = WeightSender(model.state_dict)
    await synchronizer.add_module(sender, member="trainer")
    await synchronizer.coordinate_weight_sync_setup()
    version = await synchronizer.ready_to_nccl_sync("trainer", step, member="trainer")
    if version is not None:
        await sender.send(version)
    ```

    Args:
        state_dict: Called for the weights of each transfer.
        host: The host at which the explorers reach this process; loopback if None.
        backend: `gloo`, or `nccl` for tensors on `device`.
        device: Where tensors are while they travel; the CPU for gloo.
    """

    def __init__(
        self,
        state_dict: Callable[[], Mapping[str, torch.Tensor]],
        host: str | None = None,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(backend, device)
        self._state_dict = state_dict
        self._host = host or parse_address(loopback_here("127.0.0.1:0"))[0].strip("[]")

    def get_weight_sync_info(self) -> tuple[str, int, Meta]:
        """Returns the address and a free port for the members to meet, and the meta of the weights."""
        both = socket.has_dualstack_ipv6()  # the port is free for IPv4 and IPv6, as far as this machine has them
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
            port = int(listener.getsockname()[1])
        return self._host, port, meta_of(dict(self._state_dict()))

    async def send(self, version: int) -> None:
        """Sends the weights to all explorers of the group, which call `receive` at the same time.

        Raises:
            StateError: A member was lost, or there is no group. Set it up again.
        """
        state = dict(self._state_dict())

        def send(broadcast: Callable[[torch.Tensor], None]) -> None:
            broadcast(torch.tensor([version]))
            digest = hashlib.sha256()
            for tensor in state.values():
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                digest.update(raw.cpu().numpy().data)
                if raw.numel():
                    broadcast(raw)
            broadcast(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))

        await self._in_group(send)


class WeightReceiver(_CollectiveMember):
    """The explorer's end of a weight sync group; see `WeightSender` for the arguments.

    ```python
    version = await synchronizer.ready_to_nccl_sync("explorer", 0)
    if version is not None:
        model.load_state_dict(await receiver.receive(version))
    ```
    """

    def __init__(self, backend: str = "gloo", device: torch.device | str = "cpu") -> None:
        super().__init__(backend, device)
        self._meta: Meta = []

    async def set_state_dict_meta(self, state_dict_meta: Meta) -> None:
        """Takes the names, dtypes and shapes that the trainer will send."""
        self._meta = state_dict_meta

    async def receive(self, version: int) -> StateDict:
        """Receives the weights of `version`, while the trainer calls `send`.

        Returns:
            The weights on the CPU; all of one version.

        Raises:
            StateError: A member was lost, there is no group, the trainer sent another version, or the digest is wrong.
        """
        meta = list(self._meta)

        def receive(broadcast: Callable[[torch.Tensor], None]) -> StateDict:
            sent = torch.zeros(1, dtype=torch.int64)
            broadcast(sent)
            state: StateDict = {}
            digest = hashlib.sha256()
            for name, dtype, shape in meta:
                tensor = state[name] = torch.empty(shape, dtype=DTYPES[dtype])
                raw = tensor.reshape(-1).view(torch.uint8)
                if raw.numel():
                    broadcast(raw)
                digest.update(raw.numpy().data)
            sent_digest = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
            broadcast(sent_digest)
            if sent.item() != version:
                raise StateError(f"the trainer sent version {sent.item()}, not {version}; ask for the next one")
            if bytes(sent_digest.numpy()) != digest.digest():
                raise StateError(f"the weights of version {version} arrived with another digest; ask for the next ones")
            return state

        return await self._in_group(receive)


async def _interruptible(action: Callable[[], T], leaving: threading.Event) -> T:
    """Runs `action` in a thread; a cancellation sets `leaving`, which makes it raise soon."""

    def run() -> tuple[T] | Exception:
        try:
            return (action(),)
        except Exception as error:
            return error  # after a cancellation nobody would see it raised

    def give_up() -> bool:
        leaving.set()
        return False

    result = await in_thread(run, give_up)
    if isinstance(result, Exception):
        raise result
    return result[0]


@contextmanager
def _errors_stay_here() -> Iterator[None]:
    """Inside, a group of NCCL is made that only tells its errors: else torch ends the process when a member is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _own_address(host: str, port: int) -> str | None:
    """The address of this machine from which it calls rank 0 (of rank 0: at which it is called); None if it cannot."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None
