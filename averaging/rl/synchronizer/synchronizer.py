"""`Synchronizer`: coordinates trainers and explorers, and hands out weights by version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

from averaging.common import one_of
from averaging.config import FilePath, TLSFiles
from averaging.errors import ClosedError, ConfigError, StateError, WaitTimeoutError
from averaging.peer import Peer
from averaging.rl.synchronizer.coordination import Coordination, RunningStatus
from averaging.rl.synchronizer.group_setup import Waiters, WeightGroups, now
from averaging.rl.synchronizer.modules import POLL_SECONDS, Module, Modules
from averaging.rl.synchronizer.options import GROUP_SECONDS, SynchronizerConfig, SyncMethod
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rl.synchronizer.service import SynchronizerService, serve_on, served_on
from averaging.rl.synchronizer.state_sources import find_checkpoints, follow_peer, read_version, write_version
from averaging.rl.synchronizer.state_stream import Meta, ModelState, StateDict, copy_in_thread, copy_of, meta_of
from averaging.rpc import RpcHandler, read_credentials
from averaging.tensors import in_thread

logger = logging.getLogger("averaging.rl.synchronizer")

_PEER = "the peer"
"""The member that publishes the versions of the peer."""

Role = Literal["trainer", "explorer"]


class Synchronizer:
    """Coordinates one or more trainers and explorers, and hands out the newest weights by version.

    ```python
    async with Synchronizer(state_dict=model.state_dict()) as synchronizer:
        await synchronizer.set_trainer_status(RunningStatus.RUNNING)
        await synchronizer.set_model_state_dict(model.state_dict(), trainer_step=1)
    ```

    It is an async context manager and belongs to one event loop. As a service it is given to `RpcServer`, `Peer` or
    `DecentralizedAverager`; `Synchronizer(peer)` adds itself to the peer. `connect` gives the same methods elsewhere.

    The methods have the names and meanings of `trinity.manager.synchronizer.Synchronizer`. A *member* is a process or
    task that has statuses. The methods that change a status take its name as `member`; with several trainers or
    explorers in one process give each its own. The statuses of a member whose modules are all dead are removed.

    Args:
        peer: A peer that has not been entered. The synchronizer is served on its port. Its tensors are the state until
            the first `set_model_state_dict`, under the version of the peer.
        config: The options.
        state_dict: The first state, which has version 0.

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
    ) -> None:
        self.config = config or SynchronizerConfig()
        folder = self.config.checkpoint_dir
        self._folder = None if folder is None else Path(folder)
        self._reserved, step = (0, None) if self._folder is None else read_version(self._folder)
        self._state = Coordination(self._reserved)
        if self.config.sync_method is SyncMethod.CHECKPOINT:
            self._state.step = step  # the checkpoint that was handed out last is still in the folder
        self._model_state: ModelState = copy_of(state_dict)
        self._waiting = Waiters(self._state)
        self._modules = Modules()
        self._groups = WeightGroups(self.config.group_name, self._modules, self._state, self._waiting)
        self._peer = peer
        self._main: asyncio.Task[None] | None = None
        self._holders = 0
        self._detached = False
        self._ended = False
        self._closing = asyncio.Event()
        if peer is not None:
            serve_on(peer, self)

    def __repr__(self) -> str:
        name = f" {self.config.namespace!r}" if self.config.namespace else ""
        stopped = self.trainer_status is RunningStatus.STOPPED
        trainer = (
            "no trainer yet" if stopped and not self._state.trainers_stopped else f"trainer {self.trainer_status.value}"
        )
        return f"<Synchronizer{name} at version {self._state.version}, {trainer}>"

    # Life

    async def __aenter__(self) -> Self:
        self._holders += 1
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._holders -= 1
        if not self._holders and not (self._detached and len(self._modules)):
            await self.close()

    async def close(self) -> None:
        """Ends all waits with a `ClosedError`, and all background tasks."""
        self._end()
        await self._groups.give_up()
        if self._main is not None:
            await asyncio.wait([self._main])

    def start(self) -> None:
        """Starts the background tasks, like `async with`, if they are not running. A server does so if nobody has.

        Raises:
            ClosedError: The synchronizer has ended.
        """
        self._check()
        if self._main is None:
            self._main = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                jobs = [tasks.create_task(self._poll_modules())]
                if self.config.sync_method is SyncMethod.CHECKPOINT and self._folder is not None:
                    finding = find_checkpoints(
                        self._folder, lambda: self._state.step, lambda step: self.set_model_state_dict(None, step)
                    )
                    jobs.append(tasks.create_task(finding))
                if self._peer is not None:
                    self._state.set_trainer_status(RunningStatus.RUNNING, _PEER)
                    following = follow_peer(self._peer, lambda state, step: self._publish(state, step, _PEER))
                    jobs.append(tasks.create_task(following))
                await self._closing.wait()
                for job in jobs:
                    job.cancel()
        except Exception:
            logger.exception("%r has ended after an error", self)
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._closing.set()
        self._state.end()
        self._waiting.release()
        for actors in list(_actors.values()):
            if actors.get(self.config.namespace) is self:
                del actors[self.config.namespace]

    def _check(self) -> None:
        if self._ended:
            raise ClosedError("this synchronizer has ended; none of its modules is alive, or it was closed")

    # Modules

    async def add_module(self, module: Module, *, member: str = "") -> None:
        """Tracks a module: it is polled each second, and dropped when it is dead.

        When none is left, a synchronizer from `get_actor` ends, unless it is held with `async with`.

        Args:
            module: An object with `is_alive()`; see `averaging.rl.synchronizer.modules`.
            member: The name under which it has statuses.

        Raises:
            ClosedError: The synchronizer has ended, or has not been entered.
        """
        self._check()
        if self._main is None:
            raise ClosedError("this synchronizer is not running; use it inside `async with`")
        self._modules.add(module, member)

    def remove_member(self, member: str) -> None:
        """Removes a member that is gone: its modules, its statuses and its waits."""
        self._modules.remove(member)
        self._state.leave(member)
        self._waiting.release()

    @property
    def module_count(self) -> int:
        """The number of modules that are tracked."""
        return len(self._modules)

    @property
    def ended(self) -> bool:
        """Whether it was closed, or none of its modules is alive."""
        return self._ended

    async def _poll_modules(self) -> None:
        while True:
            for member in await self._modules.dead():
                logger.info("%r is dead; its statuses are removed", member)
                self.remove_member(member)
            if self._detached and not self._holders and self._modules.tracked and not len(self._modules):
                logger.info("%r ends: none of its modules is alive", self)
                self._closing.set()
                return
            await asyncio.sleep(POLL_SECONDS)

    # Statuses

    @property
    def trainer_status(self) -> RunningStatus:
        """The status of the trainer; of several, the first of REQUIRE_SYNC, RUNNING and STOPPED that one has.

        It is STOPPED before the first trainer has come, too; `trainer_requires_weight_sync` distinguishes the two.
        """
        return self._state.trainer_status

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        """The number of explorers in each status."""
        return self._state.explorer_status_counts

    async def set_trainer_status(self, status: RunningStatus | str, *, member: str = "") -> None:
        """Sets the status of a trainer. When all have stopped, explorers that wait get the present version.

        Args:
            status: Its status, or the name of one.
            member: The trainer.

        Raises:
            ConfigError: There is no such status.
        """
        self._check()
        self._state.set_trainer_status(one_of(RunningStatus, status, "status"), member)
        self._waiting.release()

    def trainer_requires_weight_sync(self) -> bool | None:
        """Returns whether a trainer is ready to transfer weights; None if all trainers have stopped.

        Before the first trainer has come, it is False.
        """
        self._check()
        if self._state.trainers_stopped:
            return None
        return self.trainer_status is RunningStatus.REQUIRE_SYNC

    async def get_status(self) -> dict[str, Any]:
        """Returns statuses, version and path in one answer; without those that are not there yet."""
        stopped = self.trainer_status is RunningStatus.STOPPED
        came = not stopped or self.trainer_requires_weight_sync() is None
        return {
            "trainer_status": self.trainer_status if came else None,
            **{f"explorers_{status.value}": count for status, count in self.explorer_status_counts.items()},
            "version": self.model_version,
            "path": await self.get_latest_model_path(),
            "modules": self.module_count,
        }

    async def set_explorer_status(
        self, status: RunningStatus | str, old_status: RunningStatus | str | None = None, *, member: str = ""
    ) -> None:
        """Counts an explorer in `status`, and no longer in `old_status`.

        When an explorer stops, those that wait for a new state get the present version.

        Args:
            status: Its new status, or the name of one.
            old_status: Its former status; None for a new explorer.
            member: Whose explorer it is.

        Raises:
            ConfigError: There is no such status, or no explorer of this member is in `old_status`. Nothing was changed.
        """
        self._check()
        old = None if old_status is None else one_of(RunningStatus, old_status, "old_status")
        self._state.set_explorer_status(one_of(RunningStatus, status, "status"), old, member)
        self._waiting.release()

    def explorer_requires_sync(self) -> bool:
        """Returns whether an explorer waits for weights."""
        self._check()
        return self.explorer_status_counts[RunningStatus.REQUIRE_SYNC] > 0

    def is_trainer(self, member: str) -> bool:
        """Returns whether a member is a trainer that has not stopped, or has set the newest state."""
        return self._state.is_trainer(member)

    # The state

    @property
    def model_state_dict(self) -> ModelState:
        """The newest state: tensors by name, a path, or None."""
        return self._model_state

    @property
    def model_version(self) -> int:
        """The newest version. It never decreases."""
        return self._state.version

    async def set_model_state_dict(
        self, model_state_dict: StateDict | str | None, trainer_step: int, *, member: str = ""
    ) -> int:
        """Sets the state, and gives it to explorers that wait for one.

        The version is the step, if that is above the present version. A trainer that was restarted from an earlier
        checkpoint, and one of several trainers, gets the present version plus one instead.

        Args:
            model_state_dict: The tensors, of which a copy is kept; a path; or None if the weights are in the checkpoint
                of that step.
            trainer_step: The step of the trainer.
            member: The trainer.

        Returns:
            The version.

        Raises:
            ConfigError: The step is out of range.
            TensorError: A tensor cannot be sent.
        """
        self._check()
        self._state.next_version(trainer_step, member)
        copied = await copy_in_thread(model_state_dict)
        self._stop_following()
        return await self._publish(copied, trainer_step, member)

    async def adopt_model_state_dict(self, state: ModelState, trainer_step: int, member: str) -> int:
        """Does the same with a state that nobody else writes, without a copy."""
        self._check()
        self._stop_following()
        return await self._publish(state, trainer_step, member)

    async def _publish(self, state: ModelState, step: int, member: str) -> int:
        await self._reserve(lambda: self._state.next_version(step, member), step)
        self._check()
        self._model_state = state
        version = self._state.publish(step, member)
        self._waiting.release()
        logger.info("version %d is set, of step %d", version, step)
        return version

    async def _reserve(self, version: Callable[[], int], step: int | None) -> None:
        """Writes the version and its step to the checkpoint folder before it is handed out."""
        folder = self._folder
        while folder is not None and (wanted := version()) > self._reserved:
            try:
                await in_thread(lambda wanted=wanted: write_version(folder, wanted, step))  # type: ignore[misc]
            except OSError as error:
                raise StateError(f"the version cannot be kept in {folder}: {error}; the former one stays") from None
            self._reserved = max(self._reserved, wanted)

    def get_model_state_dict(self) -> tuple[ModelState, int]:
        """Returns the newest state and its version. Do not write to the tensors."""
        self._check()
        return self._model_state, self._state.version

    def get_model_state_dict_iterator(self) -> Iterator[tuple[str, object]]:
        """Yields the names and tensors of the newest state; nothing if there is no state.

        Raises:
            ConfigError: The state is a path.
        """
        self._check()
        state = self._model_state
        if isinstance(state, str):
            raise ConfigError(f"the state is a path, {state}; get_model_state_dict() returns it")
        yield from (state or {}).items()

    async def get_state_dict_meta(self) -> Meta | None:
        """Returns the name, dtype and shape of each tensor; None if there is no state.

        Raises:
            ConfigError: The state is a path.
        """
        self._check()
        state = self._model_state
        if isinstance(state, str):
            raise ConfigError(f"the state is a path, {state}; read its tensors there")
        return None if state is None else meta_of(state)

    async def wait_new_model_state_dict(
        self, current_version: int, *, member: str | None = "", timeout: float = 0.0
    ) -> int:
        """Waits until there is a version above `current_version`; the explorer requires sync meanwhile.

        Args:
            current_version: The version that the explorer has.
            member: Whose explorer waits; None for a caller without a status.
            timeout: Seconds to wait; 0 for `sync_timeout`, which is also the maximum.

        Returns:
            The newest version. It is the one that the explorer has if the trainers or an explorer stopped, or after
            `notify_no_new_model_state_dict`.

        Raises:
            WaitTimeoutError: Nothing came in time. The explorer is RUNNING again.
            ConfigError: No explorer of this member is RUNNING, or `current_version` was never handed out here.
            ClosedError: The synchronizer has ended, or the member has left.
        """
        self._check()
        limit = self.config.sync_timeout
        limit = timeout if 0 < timeout < limit else limit
        wait = self._state.wait_new_state(current_version, member or "", now() + limit, counted=member is not None)
        version = (await self._waiting.end_of(wait)).version
        if version is None:
            raise WaitTimeoutError(f"no version above {current_version} came within {limit:g} s")
        return version

    async def notify_no_new_model_state_dict(self) -> None:
        """Gives explorers that wait for a new state the present version."""
        self._check()
        self._state.no_new_state()
        self._waiting.release()

    async def get_latest_model_version(self) -> int:
        """Returns the newest version."""
        self._check()
        return self._state.version

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        """Returns the path of the newest weights: the path that was set, or `<checkpoint_dir>/global_step_N/actor`.

        Args:
            use_huggingface: Whether to return the folder `huggingface` in it. A path that was set and has none is
                returned as it is.

        Returns:
            The path. None if no state was set, if there is no `checkpoint_dir`, or if tensors were set and there is no
            checkpoint of their step.
        """
        self._check()
        state = self._model_state
        if isinstance(state, str):
            inner = Path(state) / "huggingface"
            return str(inner) if use_huggingface and await in_thread(inner.is_dir) else state
        if self._folder is None or self._state.step is None:
            return None
        path = self._folder / f"global_step_{self._state.step}" / "actor"
        path = path / "huggingface" if use_huggingface else path
        return str(path) if state is None or await in_thread(path.is_dir) else None

    # Weight sync groups

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Meta | None = None
    ) -> None:
        """Lets the explorers join the group of a trainer that has joined as rank 0 already, or does so now.

        Args:
            master_address: Host of the trainer.
            master_port: Port at which the members meet.
            state_dict_meta: Names, dtypes and shapes that the trainer will send; None to leave them as they are.

        Raises:
            StateError: A member failed; all have left the group.
        """
        self._check()
        limit = min(GROUP_SECONDS, self.config.sync_timeout)
        await self._groups.join(master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None, *, member: str = "") -> None:
        """Sets up one weight sync group for each trainer, with its share of the explorers; all join at the same time.

        Repeat it after a member was lost, or for new members. A call during a set-up waits for the same one.

        Args:
            timeout: Seconds for the set-up, and later for the transfer of a tensor; at most `sync_timeout`. None or 0
                for 5 minutes.
            member: The member that calls, if it is one. Groups of others that have lost no member are left alone then.

        Raises:
            StateError: A member failed or was late, or there is no trainer or explorer. None of these members is
                in a group then.
        """
        self._check()
        await self._groups.set_up(min(timeout or GROUP_SECONDS, self.config.sync_timeout), member)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Lets all members leave their groups: first the explorers, then the trainers. Dead ones are left out.

        A set-up in progress is given up.
        """
        self._check()
        await self._groups.tear_down()

    async def ready_to_nccl_sync(self, module: Role, trainer_step: int, *, member: str = "") -> int | None:
        """Says that a side is ready to transfer weights, and waits until the other one is.

        With several members, a trainer waits for all explorers of its group, and they for it and each other. An
        explorer that comes before the first trainer waits for that.

        Args:
            module: `trainer` or `explorer`.
            trainer_step: The step of the trainer; ignored for an explorer.
            member: The trainer or explorer.

        Returns:
            The version of the weights that are transferred now. None if the other side is not ready within
            `sync_timeout`, has stopped or died; or if the group of this member has lost one, and has to be set
            up again. The version is the former one then.

        Raises:
            ConfigError: No explorer of this member is RUNNING, or `module` is neither of the two.
            ClosedError: The synchronizer has ended, or the member has left.
        """
        self._check()
        if module not in ("trainer", "explorer"):
            raise ConfigError(f"module must be 'trainer' or 'explorer', not {module!r}")
        deadline = now() + self.config.sync_timeout
        if module == "trainer":
            self._stop_following()
            await self._reserve(lambda: self._state.next_version(trainer_step, member), trainer_step)
            self._check()
            wait = self._state.trainer_ready(trainer_step, member, deadline)
        else:
            wait = self._state.explorer_ready(member, deadline)
        version = (await self._waiting.end_of(wait)).version
        if version is not None:
            await self._reserve(lambda: version, None)
        return version

    # Sources of states

    def _stop_following(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            self.remove_member(_PEER)

    # As a service

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `averaging.rpc.RpcService`."""
        return SynchronizerService([self]).rpc_handlers()

    # Others

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
        """Returns the synchronizer of a namespace, and creates it if `config` is given. Call it in an event loop.

        A synchronizer that is created here runs until its modules are dead, or `close` is called.

        Args:
            config: The options for a new one, with its namespace.
            namespace: The namespace, if there is no config.
            peer: The peer on which it is; None for those of this process.
            module: A module to track, such as the caller.
            member: The name of the module's member.

        Raises:
            ConfigError: There is none in this namespace, and no config to create it.
        """
        name = config.namespace if config is not None else namespace or ""
        actor = _present(peer).get(name)
        if actor is None or actor.ended:
            if config is None:
                raise ConfigError(f"there is no synchronizer in namespace {name!r}; give a config to create one")
            actor = cls(peer, config)
            actor._detached = True
            if peer is None:
                _actors.setdefault(asyncio.get_running_loop(), {})[name] = actor
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

        ```python
        async with Synchronizer.connect("trainer.example:4222", name="explorer 1") as synchronizer:
            await synchronizer.set_explorer_status(RunningStatus.RUNNING)
            version = await synchronizer.wait_new_model_state_dict(0)
        ```

        Args:
            endpoint: `host:port` of the peer or server.
            namespace: The namespace of the synchronizer there.
            name: The name of this process in messages.
            tls: Certificates, if the server has TLS.
            token_file: File with the run's tokens.
            timeout: Seconds to connect, and for the answer to a call that does not wait.

        Raises:
            ConfigError: The endpoint is malformed, or a file cannot be read.
        """
        credentials = read_credentials(tls=tls, token_file=token_file)
        return RemoteSynchronizer(endpoint, credentials, namespace=namespace, name=name, timeout=timeout)


_actors: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Synchronizer]] = WeakKeyDictionary()
"""The synchronizers of this process by namespace, for each event loop."""


def _present(peer: Peer | None) -> dict[str, Synchronizer]:
    """The synchronizers of a peer, or of this event loop, by namespace."""
    if peer is None:
        return _actors.get(asyncio.get_running_loop(), {})
    return {name: each for name, each in served_on(peer).items() if isinstance(each, Synchronizer)}
