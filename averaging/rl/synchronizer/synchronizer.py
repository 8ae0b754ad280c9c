"""`Synchronizer`: coordinates trainers and explorers, and hands out weights by version."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from averaging.common import one_of
from averaging.config import FilePath, TLSFiles
from averaging.errors import ClosedError, ConfigError, StateError, WaitTimeoutError
from averaging.peer import Peer
from averaging.receipts import WeightReader
from averaging.rl.synchronizer.coordination import (
    MAX_VERSION,
    Coordination,
    End,
    RunningStatus,
    SynchronizerConfig,
    SyncMethod,
    Wait,
)
from averaging.rl.synchronizer.groups import GROUP_SECONDS, POLL_SECONDS, Module, Modules, WeightGroups
from averaging.rl.synchronizer.methods import Meta, ModelState, StateDict, copy_in_thread, copy_of, meta_of
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rl.synchronizer.service import SynchronizerService, serve_on, served_on
from averaging.rpc import RpcHandler, read_credentials
from averaging.tensors import in_thread

logger = logging.getLogger("averaging.rl.synchronizer")

_PEER = "the peer"  # the member that publishes the versions of the peer
VERSION_FILE = "synchronizer_version.txt"  # in the folder of checkpoints
LATEST_FILE = "latest_state_dict_iteration.txt"  # in it a trainer writes the step of its newest checkpoint

Role = Literal["trainer", "explorer"]


def read_numbers(path: Path) -> list[int]:
    """Returns the numbers in a file; none if it cannot be read now."""
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
    return numbers if all(0 <= number <= MAX_VERSION for number in numbers) else []


class CheckpointFolder:
    """A trainer's checkpoints, and beside them the version of the synchronizer, so that it never goes back.

    `VERSION_FILE` has the highest version that may have been handed out, and the step of the trainer that has it, if it
    is known. It is written before such a version is handed out. Without a `path` nothing is kept.
    """

    def __init__(self, path: FilePath | None) -> None:
        self.path = None if path is None else Path(path)
        self.version, self.step = 0, None
        if self.path is not None and (file := self.path / VERSION_FILE).exists():
            numbers = read_numbers(file)
            if len(numbers) not in (1, 2):
                raise ConfigError(f"{file} should hold the last version as a number; restore it, or write that into it")
            self.version, self.step = numbers[0], numbers[1] if len(numbers) == 2 else None

    async def reserve(self, version: Callable[[], int], step: int | None) -> None:
        """Writes a version and its step to disk before it is handed out."""
        # The version may become a higher one while a lower one is written, so it is asked for again.
        while self.path is not None and (wanted := version()) > self.version:
            try:
                await in_thread(partial(_write, self.path, f"{wanted}\n" if step is None else f"{wanted} {step}\n"))
            except OSError as error:
                raise StateError(f"the version cannot be kept in {self.path}: {error}; the former one stays") from None
            self.version = max(self.version, wanted)

    def weights(self, step: int | None) -> Path | None:
        return None if self.path is None or step is None else self.path / f"global_step_{step}" / "actor"


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / VERSION_FILE, folder / f".{VERSION_FILE}.tmp"
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


async def find_checkpoints(
    folder: Path, present: Callable[[], int | None], hand_out: Callable[[int], Awaitable[object]]
) -> None:
    """Calls `hand_out` for each new checkpoint that a trainer announces in its folder, again while it raises an error.

    A checkpoint of an earlier step is new too: the trainer has gone back to it. That of the `present` state is not.
    """
    seen, failed = None, None
    while True:
        numbers = await in_thread(lambda: read_numbers(folder / LATEST_FILE))
        step = numbers[0] if len(numbers) == 1 else None
        if step is not None and step != seen:
            try:
                if step != present():
                    await hand_out(step)
                seen = step
            except (ConfigError, StateError) as error:
                if step != failed:
                    logger.warning("the checkpoint of step %d is not handed out: %s", step, error)
                failed = step
        await asyncio.sleep(POLL_SECONDS)


class Members:
    """The modules, statuses and weight sync groups of the members, while somebody is inside its `async with`.

    With `ends_with_modules` it goes on until none of its modules is alive.
    """

    def __init__(self, config: SynchronizerConfig, state: Coordination, *, ends_with_modules: bool) -> None:
        self.config, self._state = config, state
        self.ended = False
        self._modules = Modules()
        self._groups = WeightGroups(config.group_name, self._modules, state)
        self._main: asyncio.Task[None] | None = None
        self._ends_with_modules, self._holders = ends_with_modules, 0
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._holders += 1
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._holders -= 1
        if not self._holders and not (self._ends_with_modules and len(self._modules)):
            await self.close()

    async def close(self) -> None:
        """Ends all waits with a `ClosedError`, and all background tasks."""
        self._end()
        await self._groups.give_up()
        if self._main is not None:
            await asyncio.wait([self._main])

    def start(self) -> None:
        """Starts the background tasks, as `async with` and the first session do."""
        self._check()
        if self._main is None:
            self._main = asyncio.get_running_loop().create_task(self._run())

    def _background(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What runs until the end, beside the look at the modules."""
        return ()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(task) for task in (self._poll_modules(), *self._background())]
                await self._closing.wait()
                for task in running:
                    task.cancel()
        except Exception:
            logger.exception("%r has ended after an error", self)
        finally:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._closing.set()
        self._state.end()

    def _check(self) -> None:
        if self.ended:
            raise ClosedError("this synchronizer has ended; none of its modules is alive, or it was closed")

    async def add_module(self, module: Module, *, member: str = "") -> None:
        """Tracks a module of `member`: any object with `is_alive()`. It is dropped when it is dead.

        With the methods of `WeightSender` or `WeightReceiver` it can be in a weight sync group.
        """
        self._check()
        if self._main is None:
            raise ClosedError("this synchronizer is not running; use it inside `async with`")
        self._modules.add(module, member)

    def remove_member(self, member: str) -> None:
        """Removes a member that is gone: its modules, its statuses and its waits."""
        self._modules.remove(member)
        self._state.leave(member)

    @property
    def module_count(self) -> int:
        return len(self._modules)

    async def _poll_modules(self) -> None:
        while True:
            for member in await self._modules.dead():
                logger.info("%r is dead; its statuses are removed", member)
                self.remove_member(member)
            if self._ends_with_modules and not self._holders and self._modules.tracked and not len(self._modules):
                logger.info("%r ends: none of its modules is alive", self)
                self._closing.set()
                return
            await asyncio.sleep(POLL_SECONDS)

    @property
    def trainer_status(self) -> RunningStatus:
        """The first of REQUIRE_SYNC, RUNNING and STOPPED that any trainer has; STOPPED before the first trainer."""
        return self._state.trainer_status

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        return self._state.explorer_status_counts

    def readers(self) -> Iterable[WeightReader]:
        """The explorers, for the status of the peer that serves this synchronizer."""
        newest = self._state.version
        for member, status, version in self._state.explorers:
            yield WeightReader("explorer", member or "this process", status.value, version, newest)

    def note_received(self, member: str, version: int) -> None:
        """Notes that an explorer of `member` has the state of this version."""
        self._state.note_received(member, version)

    async def set_trainer_status(self, status: RunningStatus | str, *, member: str = "") -> None:
        """Sets the status of a trainer, also by its name. When all have stopped, waiting explorers get the version."""
        self._check()
        self._state.set_trainer_status(one_of(RunningStatus, status, "status"), member)

    def trainer_requires_weight_sync(self) -> bool | None:
        """Returns whether a trainer is ready to transfer weights; None if all have stopped, False before the first."""
        self._check()
        return None if self._state.trainers_stopped else self.trainer_status is RunningStatus.REQUIRE_SYNC

    async def set_explorer_status(
        self, status: RunningStatus | str, old_status: RunningStatus | str | None = None, *, member: str = ""
    ) -> None:
        """Counts an explorer of `member` in `status`, and no longer in `old_status`, which is None for a new explorer.

        When an explorer stops, those that wait for a new state get the present version. If no explorer of this member
        is in `old_status`, a `ConfigError` is raised and nothing is changed.
        """
        self._check()
        old = None if old_status is None else one_of(RunningStatus, old_status, "old_status")
        self._state.set_explorer_status(one_of(RunningStatus, status, "status"), old, member)

    def explorer_requires_sync(self) -> bool:
        """Returns whether an explorer waits for weights."""
        self._check()
        return self.explorer_status_counts[RunningStatus.REQUIRE_SYNC] > 0

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Meta | None = None
    ) -> None:
        """Lets the explorers join the group of a trainer that has joined as rank 0 already, or does so now.

        The trainer will send the tensors of `state_dict_meta`; None leaves it as it is.

        Raises:
            StateError: A member failed; all have left the group.
        """
        self._check()
        limit = min(GROUP_SECONDS, self.config.sync_timeout)
        await self._groups.join(master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None, *, member: str = "") -> None:
        """Sets up one weight sync group for each trainer, with its share of the explorers; all join at the same time.

        Repeat it after a member was lost, or for new members. A call during a set-up waits for the same one. If one of
        the members calls, groups of others that have lost no member are left alone. The `timeout` in seconds is that of
        the set-up, and later of each tensor: 5 minutes if None, and at most `sync_timeout`.

        Raises:
            StateError: A member failed or was late, or there is no trainer or explorer. None of these members is
                in a group then.
        """
        self._check()
        limit = timeout if timeout and timeout > 0 else GROUP_SECONDS
        await self._groups.set_up(min(limit, self.config.sync_timeout), member)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Lets all members leave their groups: first the explorers, then the trainers. Dead ones are left out.

        A set-up in progress is given up.
        """
        self._check()
        await self._groups.tear_down()


class Synchronizer(Members):
    """Coordinates one or more trainers and explorers, and hands out the newest weights by version.

    ```python
    async with Synchronizer(state_dict=model.state_dict()) as synchronizer:
        await synchronizer.set_trainer_status(RunningStatus.RUNNING)
        await synchronizer.set_model_state_dict(model.state_dict(), trainer_step=1)
    ```

    It belongs to one event loop. As a service it is given to `RpcServer`, `Peer` or `DecentralizedAverager`; `connect`
    gives the same methods elsewhere. They have the names and meanings of `trinity.manager.synchronizer.Synchronizer`.
    A *member* is a process or task that has statuses; with several trainers or explorers in one process give each its
    own name as `member`. The statuses of a member whose modules are all dead are removed.

    Args:
        peer: A peer that has not been entered. The synchronizer is served on its port. Its tensors are the state until
            the first `set_model_state_dict`, under the version of the peer.
        config: The options.
        state_dict: The first state, which has version 0.
        ends_with_modules: Whether it ends when all its modules are dead and nobody is inside its `async with`.

    Attributes:
        model_state_dict: The newest state: tensors by name, a path, or None; None after the end.
        ended: Whether it was closed, or has ended with its modules.

    Raises:
        ConfigError: An option is invalid, the peer is running, or the kept version cannot be read.
        TensorError: A tensor of `state_dict` cannot be sent.
    """

    def __init__(
        self,
        peer: Peer | None = None,
        config: SynchronizerConfig | None = None,
        *,
        state_dict: StateDict | None = None,
        ends_with_modules: bool = False,
    ) -> None:
        config = config or SynchronizerConfig()
        self._checkpoints = CheckpointFolder(config.checkpoint_dir)
        super().__init__(config, Coordination(self._checkpoints.version), ends_with_modules=ends_with_modules)
        if self.config.sync_method is SyncMethod.CHECKPOINT:
            self._state.step = self._checkpoints.step  # its checkpoint is still in the folder
        self.model_state_dict: ModelState = copy_of(state_dict)
        self._peer = peer  # whose versions are handed out; None once a trainer has set a state
        self._following: asyncio.Task[None] | None = None
        if peer is not None:
            serve_on(peer, self)

    def __repr__(self) -> str:
        name = f" {self.config.namespace!r}" if self.config.namespace else ""
        trainer = f"trainer {self.trainer_status.value}" if self._state.trainer_came else "no trainer yet"
        return f"<Synchronizer{name} at version {self._state.version}, {trainer}>"

    def _background(self) -> Iterable[Coroutine[Any, Any, None]]:
        folder = self._checkpoints.path
        if self.config.sync_method is SyncMethod.CHECKPOINT and folder is not None:
            yield find_checkpoints(folder, lambda: self._state.step, partial(self.set_model_state_dict, None))
        if self._peer is not None:
            self._state.set_trainer_status(RunningStatus.RUNNING, _PEER)
            yield self._follow_peer(self._peer)

    def _end(self) -> None:
        super()._end()
        self.model_state_dict = None

    async def get_status(self) -> dict[str, Any]:
        """Returns statuses, version and path in one answer; without those that are not there yet."""
        self._check()
        return {
            "trainer_status": self.trainer_status if self._state.trainer_came else None,
            **{f"explorers_{status.value}": count for status, count in self.explorer_status_counts.items()},
            "version": self.model_version,
            "path": await self.get_latest_model_path(),
            "modules": self.module_count,
        }

    @property
    def model_version(self) -> int:
        """The newest version. It never decreases."""
        return self._state.version

    async def set_model_state_dict(
        self, model_state_dict: ModelState, trainer_step: int, *, member: str = "", copy: bool = True
    ) -> int:
        """Sets the state, gives it to explorers that wait for a state, and returns its version.

        The version is the step, if that is above the present version. A trainer that was restarted from an earlier
        checkpoint, and one of several trainers, gets the present version plus one instead.

        The state is a dict of tensors, a path, or None if the weights are in the checkpoint of that step of the trainer
        `member`. Without `copy` nobody may write to the tensors any more.

        Raises:
            ConfigError: The step is out of range.
            TensorError: A tensor cannot be sent.
        """
        self._check()
        self._state.next_version(trainer_step, member)
        kept = await copy_in_thread(model_state_dict) if copy else model_state_dict
        self._stop_following()
        return await self._publish(kept, trainer_step, member)

    async def _publish(self, state: ModelState, step: int, member: str) -> int:
        await self._reserve(step, member)
        self.model_state_dict = state
        version = self._state.publish(step, member)
        logger.info("version %d is set, of step %d", version, step)
        return version

    def get_model_state_dict(self) -> tuple[ModelState, int]:
        """Returns the newest state and its version. Do not write to the tensors."""
        self._check()
        return self.model_state_dict, self._state.version

    def get_model_state_dict_iterator(self) -> Iterator[tuple[str, object]]:
        """Yields the names and tensors of the newest state, if any. Raises a ConfigError if the state is a path."""
        yield from (self._tensors() or {}).items()

    async def get_state_dict_meta(self) -> Meta | None:
        """Returns the name, dtype and shape of each tensor; None without a state; a ConfigError if that is a path."""
        state = self._tensors()
        return None if state is None else meta_of(state)

    def _tensors(self) -> StateDict | None:
        self._check()
        if isinstance(self.model_state_dict, str):
            raise ConfigError(f"the state is a path, {self.model_state_dict}, which get_model_state_dict() returns")
        return self.model_state_dict

    async def wait_new_model_state_dict(
        self, current_version: int, *, member: str | None = "", timeout: float = 0.0
    ) -> int:
        """Waits for a version above the explorer's `current_version`, and returns the newest one.

        The explorer is in REQUIRE_SYNC meanwhile; a caller without a status gives None as `member`. It gets the version
        that it has if the trainers or an explorer stopped, or after `notify_no_new_model_state_dict`. A `timeout` of
        0 s is `sync_timeout`, which is also the maximum.

        Raises:
            WaitTimeoutError: Nothing came in time. The explorer is RUNNING again.
            ConfigError: No explorer of this member is RUNNING, or `current_version` was never handed out here.
            ClosedError: The synchronizer has ended, or the member has left.
        """
        self._check()
        limit = timeout if 0 < timeout < self.config.sync_timeout else self.config.sync_timeout
        deadline, counted = asyncio.get_running_loop().time() + limit, member is not None
        wait = self._state.wait_new_state(current_version, member or "", deadline, counted=counted)
        version = await self._answer_to(wait)
        if version is None:
            raise WaitTimeoutError(f"no version above {current_version} came within {limit:g} s")
        return version

    async def notify_no_new_model_state_dict(self) -> None:
        """Gives explorers that wait for a new state the present version."""
        self._check()
        self._state.no_new_state()

    async def get_latest_model_version(self) -> int:
        """Returns the newest version."""
        self._check()
        return self._state.version

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Returns the path of the newest weights: the path that was set, or `<checkpoint_dir>/global_step_N/actor`.

        With `use_huggingface` it is the folder `huggingface` in that; a path that was set stays if it has none. It is
        None if no state was set, if there is no `checkpoint_dir`, or if it has no such folder of that step.
        """
        self._check()
        state = self.model_state_dict
        if isinstance(state, str):
            inner = Path(state) / "huggingface"
            return str(inner) if use_huggingface and await in_thread(inner.is_dir) else state
        path = self._checkpoints.weights(self._state.step)
        path = path / "huggingface" if path is not None and use_huggingface else path
        return str(path) if path is not None and await in_thread(path.is_dir) else None

    async def ready_to_nccl_sync(self, module: Role, trainer_step: int, *, member: str = "") -> int | None:
        """Says that a trainer or an explorer is ready to transfer weights, and waits until the other side is.

        With several members, a trainer waits for all explorers of its group, and they for it and each other. An
        explorer that comes before the first trainer waits for that. The step of an explorer is ignored.

        Returns:
            The version of the weights that are transferred now. None if the other side is not ready within
            `sync_timeout`, has stopped or died, or if this member's group has lost a member and has to be set up again.
            The version stays then.

        Raises:
            ConfigError: No explorer of this member is RUNNING, or `module` is neither of the two.
            ClosedError: The synchronizer has ended, or the member has left.
        """
        self._check()
        if module not in ("trainer", "explorer"):
            raise ConfigError(f"module must be 'trainer' or 'explorer', not {module!r}")
        deadline = asyncio.get_running_loop().time() + self.config.sync_timeout
        if module == "trainer":
            self._stop_following()
            await self._reserve(trainer_step, member)
            wait = self._state.trainer_ready(trainer_step, member, deadline)
        else:
            wait = self._state.explorer_ready(member, deadline)
        version = await self._answer_to(wait)
        if version is not None:
            await self._checkpoints.reserve(lambda: version, None)
        return version

    async def _follow_peer(self, peer: Peer) -> None:
        """Hands out a copy of the peer's tensors for each of its versions that is seen."""
        self._following, followed = asyncio.current_task(), -1
        names = [spec.name for spec in peer.schema.tensors]

        def copy() -> StateDict:
            with peer.tensors() as tensors:
                return {name: tensor.cpu().clone() for name, tensor in zip(names, tensors, strict=True)}

        while self._peer is not None:
            if peer.version > followed:
                followed = peer.version
                await self._publish(await in_thread(copy), followed, _PEER)
            await asyncio.sleep(POLL_SECONDS)

    def _stop_following(self) -> None:
        if self._peer is not None:
            self._peer = None
            self.remove_member(_PEER)
            if self._following is not None:
                self._following.cancel()  # the peer's weights that are being copied would get a version above the next

    async def _reserve(self, step: int, member: str) -> None:
        await self._checkpoints.reserve(lambda: self._state.next_version(step, member), step)
        self._check()

    async def _answer_to(self, wait: Wait) -> int | None:
        """Returns the version with which a wait ends. If this is cancelled, the member no longer waits."""
        ended = asyncio.Event()
        wait.on_end = ended.set
        try:
            async with asyncio.timeout_at(wait.deadline):
                if wait.end is None:
                    await ended.wait()
        except TimeoutError:
            self._state.expire(wait.deadline)
        finally:
            self._state.cancel(wait)
        if wait.end is End.LEFT:
            raise ClosedError("the member that waits has left the synchronizer, or the synchronizer has ended")
        return wait.version

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return SynchronizerService([self]).rpc_handlers()

    @classmethod
    def get_actor(
        cls,
        config: SynchronizerConfig | None = None,
        namespace: str | None = None,
        *,
        peer: Peer | None = None,
        module: Module | None = None,
        member: str = "",
    ) -> Synchronizer:
        """Returns the synchronizer of a namespace on a peer, or without `peer` of this event loop.

        It is created if there is none and `config` is given, which has its namespace, and runs until its modules are
        dead, or `close` is called. `module` of `member`, such as the caller, is tracked.
        """
        name = config.namespace if config is not None else namespace or ""
        home = asyncio.get_running_loop() if peer is None else peer
        actor = served_on(home, name)
        if actor is None:
            if config is None:
                raise ConfigError(f"there is no synchronizer in namespace {name!r}; give a config to create one")
            actor = cls(peer, config, ends_with_modules=True)
            if peer is None:
                serve_on(home, actor)
        actor.start()
        if module is not None:
            actor._modules.add(module, member)
        return actor

    @classmethod
    def connect(
        cls,
        endpoint: str,
        *,
        namespace: str = "",
        name: str = "",
        tls: TLSFiles | None = None,
        token_file: FilePath | None = None,
        timeout: float = 10.0,
    ) -> RemoteSynchronizer:
        """Returns a synchronizer that is served elsewhere, as an async context manager with the same methods.

        Args:
            endpoint: `host:port` of the peer or server.
            namespace: That of the synchronizer there.
            name: The name of this process in messages.
            tls: Certificates, if the server has TLS.
            token_file: File with the run's tokens.
            timeout: Seconds to connect, and for the answer to a call that does not wait.
        """
        credentials = read_credentials(tls=tls, token_file=token_file)
        return RemoteSynchronizer(endpoint, credentials, namespace=namespace, name=name, timeout=timeout)
